"""MM-TS: losses, schedules and shifts against loops in float64, clusters and their look-up, whole runs, bad input."""

import functools
import json
import math
import re
import shutil
from types import SimpleNamespace

import common
from contrastive import evaluation, figures
from contrastive.encoders.sentences import SentenceEncoder
from contrastive.encoders.texts import Tokenizer
from contrastive.engine.processes import UserError

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import eval as eval_py
import helpers
import launch
import mmts
from helpers import (
    equal_files,
    losses,
    refused,
    run_script,
    steps,
    tiny_model,
    unit,
    write_captions,
    write_rows,
    write_video,
)
from tools import figures as several

N, D = 7, 5
DRAWS = True  # main below says which runs do
TINY = ["--cpu", "--clips", "64", "24", "24", "--batch-size", "32", "--num-clusters", "12"]
TINY += ["--image-size", "16", "--embed-dim", "16", "--max-steps", "4", "--log-every", "1", "--eval-every", "0"]


def values(seed=3):
    """(N,) between 0.05 and 0.25."""
    return 0.05 + 0.2 * torch.rand(N, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------- losses ---------------------------------------------------------
def loop_info_nce(anchor, candidates, tau, smoothing):
    """Eqs. 10, 11 over Python floats: tau of the anchor i."""
    total = 0.0
    for i in range(len(anchor)):
        logits = [float(anchor[i] @ c) / float(tau[i]) for c in candidates]
        log_z = math.log(sum(math.exp(x) for x in logits))
        losses = [log_z - x for x in logits]
        total += (1 - smoothing) * losses[i] + smoothing * sum(losses) / len(losses)
    return total / len(anchor)


def loop_margin(image, text, margin):
    """Eq. 3 over Python floats: mean over the 2 N (N - 1) pairs that are no positives."""
    terms = []
    for anchor, candidates in ((image, text), (text, image)):
        for i in range(N):
            s = [float(anchor[i] @ c) for c in candidates]
            terms += [max(0.0, float(margin[i]) - (s[i] - s[j])) for j in range(N) if j != i]
    assert len(terms) == 2 * N * (N - 1)
    return sum(terms) / len(terms)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_clip_loss_is_a_loop_with_the_anchor_s_temperature_both_ways(smoothing):
    image, text, tau = unit(N, D), unit(N, D, seed=1), values()
    expected = (loop_info_nce(image, text, tau, smoothing) + loop_info_nce(text, image, tau, smoothing)) / 2
    assert mmts.clip_loss(image, text, tau, smoothing).item() == pytest.approx(expected, rel=1e-9)
    assert mmts.clip_loss(3 * image.float(), text.float() / 2, tau.float(), smoothing).item() == pytest.approx(
        expected, rel=1e-4)
    one = mmts.clip_loss(image, text, torch.full((N,), 0.07, dtype=torch.float64), smoothing)
    for same in (0.07, torch.tensor(0.07, dtype=torch.float64)):
        assert torch.isclose(mmts.clip_loss(image, text, same, smoothing), one)
    same = torch.ones(N, D)  # a random guess
    assert mmts.clip_loss(same, same, values(), smoothing).item() == pytest.approx(math.log(N), rel=1e-6)
    logits = image @ text.T / tau[:, None]  # its transpose has the temperatures of the candidates: another loss
    wrong = F.cross_entropy(logits.T, torch.arange(N), label_smoothing=smoothing)
    assert abs(wrong.item() - mmts.clip_terms(image, text, tau, smoothing)["L_t2v"].item()) > 1e-3


def test_max_margin_loss_is_a_loop():
    image, text, margin = unit(N, D), unit(N, D, seed=1), values()
    expected = loop_margin(image, text, margin)
    assert mmts.max_margin_loss(image, text, margin).item() == pytest.approx(expected, rel=1e-9)
    assert mmts.max_margin_loss(2 * image.float(), text.float(), margin.float()).item() == pytest.approx(expected, 1e-5)
    assert mmts.max_margin_loss(image, text, 0.2).item() == pytest.approx(loop_margin(image, text, [0.2] * N))
    same = torch.ones(N, D)
    assert mmts.max_margin_loss(same, same, values()).item() == pytest.approx(values().mean().item(), rel=1e-5)
    apart = torch.eye(N)
    assert mmts.max_margin_loss(apart, apart, 0.9).item() == 0


@pytest.mark.parametrize("loss", [mmts.clip_loss, mmts.max_margin_loss])
def test_blocks_of_rows_change_nothing(loss):
    results = []
    for block in (0, 2, 100):
        image, text = (unit(N, D, seed=s).requires_grad_() for s in (0, 1))
        value = loss(image, text, values(), block=block)
        results.append([value, *torch.autograd.grad(value, (image, text))])
    for other in results[1:]:
        assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(results[0], other))


# ---------------------------------------------------- schedule and shifts -------------------------------------------
def test_schedule_at_its_turns():
    assert [mmts.base_temperature(t, 100, 0.04) for t in (0, 50, 100)] == pytest.approx([0.02, -0.02, 0.02])
    assert [mmts.base_temperature(t, 100, 0.04) for t in (25, 75)] == pytest.approx([0, 0], abs=1e-12)
    assert mmts.base_temperature(3, 7.2, 0.0) == 0
    shift = torch.tensor([0.05, 0.1])
    assert mmts.sample_temperature(50, shift, 100, 0.04).tolist() == pytest.approx([0.03, 0.08])


def test_shift_is_linear_in_the_size():
    sizes = [69_669, 13_708, 2_904]  # Fig. 6
    expected = [(k - 2_904) / (69_669 - 2_904) * (0.10 - 0.05) + 0.05 for k in sizes]
    assert mmts.cluster_shift(torch.tensor(sizes), 0.05, 0.10).tolist() == pytest.approx(expected)
    assert mmts.cluster_shift(sizes, 0.05, 0.10)[[0, 2]].tolist() == pytest.approx([0.10, 0.05])
    assert mmts.cluster_shift([4, 4, 4], 0.05, 0.10).tolist() == pytest.approx([0.05] * 3)  # 0 / 0 in the equation


# ---------------------------------------------------- flags ----------------------------------------------------------
PAPER = {("cc3m", "infonce"): (0.04, 0.05, 0.10), ("epic-kitchens-100", "max-margin"): (0.20, 0.17, 0.30),
         ("epic-kitchens-100", "infonce"): (0.08, 0.05, 0.20), ("youcook2", "max-margin"): (0.20, 0.10, 0.30),
         ("youcook2", "infonce"): (0.06, 0.06, 0.09), ("ssv2-lt", "infonce"): (0.04, 0.07, 0.11)}


@pytest.mark.parametrize("dataset, loss", PAPER)
def test_ranges_follow_dataset_and_loss(dataset, loss):
    args = mmts.parse_args(["--dataset", dataset, "--loss", loss])
    assert (args.alpha, args.shift_min, args.shift_max) == PAPER[dataset, loss]
    assert args.label_smoothing == (0.1 if (loss, dataset) in (("infonce", "youcook2"), ("infonce", "ssv2-lt")) else 0)


def test_recipes_of_the_paper():
    avion = mmts.parse_args(["--dataset", "epic-kitchens-100"])
    assert (avion.loss, avion.clusters, avion.lr, avion.batch_size, avion.frames, avion.caption_relevancy) == (
        "max-margin", "noun", 3e-5, 512, 16, 0.1)
    vast = mmts.parse_args(["--dataset", "youcook2"])
    assert (vast.loss, vast.clusters, vast.num_clusters, vast.lr, vast.batch_size, vast.grad_clip) == (
        "infonce", "captions", 200, 3e-5, 64, 2.0)
    assert (vast.lr_schedule, vast.lr_end, vast.frame_sampling, vast.eval_resize) == ("linear", 0.0, "random", "squash")
    assert not hasattr(vast, "caption_relevancy") and vast.image_encoder == "openai/clip-vit-base-patch16"
    assert mmts.parse_args(["--dataset", "ssv2-lt"]).clusters == "label"
    cc3m = mmts.parse_args(["--dataset", "cc3m"])
    assert (cc3m.tau, cc3m.cluster_encoder, cc3m.eval_datasets) == (
        0.01, "distilbert/distilbert-base-uncased", ["coco", "flickr30k"])
    default = mmts.parse_args([])
    assert (default.dataset, default.loss, default.cluster_encoder) == ("moving-emoji", "infonce", "tf-idf")


REFUSED = {
    "--alpha 0.1 --shift-min 0.05": "the temperatures of the run, 0 .. 0.17, must be above 0; lower --alpha, or raise",
    "--dataset cc3m --no-shifts": "the temperatures of the run, -0.01 .. 0.03, must be above 0",
    "--no-schedule --shift-min 0": "the temperatures of the run, 0 .. 0.12, must",
    "--loss max-margin --alpha 0.5": "the margins of the run, -0.08 .. 0.55, must be from 0",
    "--loss max-margin --no-shifts --margin 2": "the margins of the run, 1.9 .. 2.1, must be",
    "--shift-min 0.2 --shift-max 0.1": "--shift-min 0.2: larger than --shift-max 0.1",
    "--learnable-tau": "--learnable-tau: only with --loss infonce --no-schedule --no-shifts",
    "--loss max-margin --learnable-tau --no-schedule --no-shifts": "--learnable-tau: only with --loss infonce",
    "--loss max-margin --label-smoothing 0.1": "--label-smoothing: only with --loss infonce",
    "--clusters none": "--shifts need clusters",
    "--cluster-encoder small": "--cluster-encoder small: has no trained weights",
    "--loss triplet": "--loss invalid choice",
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_flags(words, capsys):
    assert REFUSED[words] in refused(mmts.parse_args, words.split(), capsys)


def test_a_margin_may_reach_zero_and_learnt_tau_needs_the_plain_loss():
    assert mmts.range_of(mmts.parse_args(["--dataset", "youcook2", "--loss", "max-margin"]), 5, 1)[0] == 0
    assert mmts.parse_args(["--no-schedule", "--no-shifts", "--learnable-tau", "--clusters", "none"]).learnable_tau


# ---------------------------------------------------- K-Means --------------------------------------------------------
def test_cluster_captions_finds_blobs():
    middles, sizes = torch.eye(4), [40, 20, 10, 5]
    truth = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    x = middles[truth] + 0.05 * torch.randn(75, 4, generator=torch.Generator().manual_seed(0))
    labels, found = mmts.cluster_captions(x, 4, seed=0)
    assert sorted(found.tolist()) == sorted(sizes) and torch.equal(labels.bincount(), found)
    assert all(len(labels[truth == c].unique()) == 1 for c in range(4))
    assert torch.equal(labels, mmts.cluster_captions(x, 4, seed=0)[0])
    once, counts = x.unique(dim=0, return_inverse=True)[0], np.full(75, 3)
    assert sorted(mmts.cluster_captions(once, 4, 0, counts)[1].tolist()) == [15, 30, 60, 120]  # weights count


def test_cluster_captions_refuses():
    with pytest.raises(ValueError, match="NaN"):
        mmts.cluster_captions(torch.tensor([[1.0, 0]] * 4 + [[math.nan, 0]]), 2, 0)
    with pytest.raises(ValueError, match="n_samples=5 should be >= n_clusters=6"):
        mmts.cluster_captions(torch.eye(5), 6, 0)


def test_centroids_and_order():
    labels, sizes, names = evaluation.clusters.largest_first(["b", "a", "b", "c", "b", "c"])
    assert (labels.tolist(), sizes.tolist(), names) == ([0, 2, 0, 1, 0, 1], [3, 2, 1], ["b", "c", "a"])
    x = unit(6, 3).float()
    expected = torch.stack([x[labels == c].mean(0) for c in range(3)])
    assert torch.allclose(evaluation.clusters.centroids(x, labels), expected)
    doubled = evaluation.clusters.centroids(x, labels, [2, 1, 1, 1, 1, 1])
    assert torch.allclose(doubled[0], (2 * x[0] + x[2] + x[4]) / 4)


# ---------------------------------------------------- clusters of data ----------------------------------------------
def made(captions, keys=None, **columns):
    keys = keys or [f"k{i}" for i in range(len(captions))]
    table = common.make_table(captions, keys, classes={"noun": ["cat", "dog", "owl"]} if "noun" in columns else None,
                              **columns)
    return common.Data("made", "train", table, pixels=torch.zeros(len(captions), 3, 8, 8, dtype=torch.uint8))


def opened(folder, train, source, k=3, encoder="tf-idf", **more):
    folder.mkdir(exist_ok=True)
    args = SimpleNamespace(**{"clusters": str(source), "cluster_encoder": encoder, "num_clusters": k, "dataset": "made",
                              "seed": 0, "image_size": 16, "workers": 0, "resume": ""} | more)
    evaluation.clusters.check_source(train, args.clusters)
    kmeans = functools.partial(mmts.cluster_captions, k=k, seed=args.seed)
    return evaluation.clusters.open_clusters(folder, args, train, torch.device("cpu"), kmeans)


KINDS = ["a red apple", "the green pear", "some blue birds"]
CAPTIONS = [[f"{KINDS[i % 3]} {w}" for w in ("here", "there")] for i in (0, 0, 0, 0, 1, 1, 1, 2)]


def test_captions_are_looked_up_by_their_words(tmp_path):
    train = made([*CAPTIONS, CAPTIONS[7]])  # the last one says what the one before it says
    found = opened(tmp_path / "a", train, "captions")
    assert found.sizes.tolist() == [8, 6, 4] and found.by == "caption"
    texts = ["some blue birds there", "a red apple here", "the green pear here"]
    assert found.look_up(["", "x", "y"], texts)[0].tolist() == [2, 0, 1] and found.look_up([""], texts[:1])[1] == 0
    labels, lost = found.look_up(["", ""], ["green pear", "blue birds, blue birds"])  # not there: nearest centroid
    assert labels.tolist() == [1, 2] and lost == 2
    unfolded = opened(tmp_path / "b", train.unfold(), "captions")
    assert torch.equal(unfolded.tensors["labels"], found.tensors["labels"])
    assert unfolded.sizes.tolist() == [8, 6, 4]
    again = evaluation.clusters.Clusters(tmp_path / "a", torch.device("cpu"))  # another process: from the file
    assert again.look_up(["", ""], ["green pear", "blue birds, blue birds"])[0].tolist() == [1, 2]
    meta = json.loads((tmp_path / "a" / "clusters.json").read_text())
    assert [e["size"] for e in meta["examples"]] == meta["sizes"] == [8, 6, 4]
    assert all("apple" in c for c in meta["examples"][0]["captions"])


def test_classes_are_counted(tmp_path):
    nouns = np.array([0, 0, 0, 2, 2, 1, -1, 0])
    train = made(CAPTIONS, noun=nouns, verb=np.array([1, 1, 2, 1, 1, 1, 1, 1]))
    found = opened(tmp_path / "noun", train, "noun")
    assert found.sizes.tolist() == [4, 2, 1] and found.meta["names"] == ["cat", "owl", "dog"]
    assert found.meta["without"] == 1
    labels, lost = found.look_up([f"k{i}" for i in range(8)] + ["new"], [""] * 9)
    assert labels.tolist() == [0, 0, 0, 1, 1, 2, -1, 0, -1] and lost == 2
    pairs = opened(tmp_path / "pairs", train.unfold(), "verb-noun")
    assert pairs.sizes.tolist() == [3, 2, 1, 1] and pairs.meta["names"][0] == "1 cat"
    val = made([["x", "y"], ["z"]], noun=np.array([2, -1]))
    pieces = {"data": val, "index": np.array([0, 1]), "owner": np.array([0, 0, 1]), "texts": ["x", "y", "z"]}
    assert found.of_queries(pieces).tolist() == [1, 1, -1]
    names = [0, 2, 1, -1, 0, 2, 1, 0]  # cat, owl, dog, none, ...: of 4, 2 and 1 training examples
    x, y = unit(8, D).float(), unit(8, D, seed=1).float()
    owner = {"owner": np.arange(8), "index": np.arange(8), "positives": torch.arange(8)[:, None], "texts": ["x"] * 8}
    pieces = owner | {"data": made([["x"]] * 8, noun=np.array(names)), "text": x, "image": y}
    ranks = [sum(float(x[i] @ y[j]) >= float(x[i] @ y[i]) for j in range(8)) for i in range(8)]
    thirds = evaluation.clusters.head_mid_tail(pieces, found)["by_cluster_size"]
    for part, noun, size in (("head", 0, 4), ("mid", 2, 2), ("tail", 1, 1)):
        own = [r for r, n in zip(ranks, names, strict=True) if n == noun]
        assert thirds[part]["MnR"] == pytest.approx(sum(own) / len(own))
        assert (thirds[part]["from"], thirds[part]["to"], thirds[part]["queries"]) == (size, size, len(own))
    with pytest.raises(UserError, match="--clusters noun: no example of made has one"):
        opened(tmp_path / "empty", made(CAPTIONS, noun=np.full(8, -1)), "noun")
    with pytest.raises(UserError, match="--clusters noun: made has no noun; --clusters captions needs none"):
        opened(tmp_path / "none", made(CAPTIONS), "noun")


def test_bad_cluster_files(tmp_path):
    with pytest.raises(UserError, match="nouns: .*No such file"):
        opened(tmp_path / "out", made(CAPTIONS), "nouns")
    for content, words in (('{"a": 1}', "no example of made has one"), ("{", "Expecting"), ("[1]", "list")):
        (tmp_path / "mine.json").write_text(content)
        with pytest.raises(UserError, match=words):
            opened(tmp_path / "out", made(CAPTIONS), tmp_path / "mine.json")
    assert not (tmp_path / "out" / "clusters.json").exists()


def test_too_few_captions_and_no_words(tmp_path):
    with pytest.raises(UserError, match="--clusters captions: n_samples=6 should be >= n_clusters=7"):
        opened(tmp_path / "a", made(CAPTIONS), "captions", k=7)
    with pytest.raises(UserError, match="--cluster-encoder tf-idf: empty vocabulary"):
        opened(tmp_path / "b", made([["?"], ["!"], ["."]]), "captions", k=2)


def test_an_earlier_try_leaves_no_clusters_to_a_new_run(tmp_path):
    """A folder with a --run-name in which nothing was trained is taken over, and so may hold other clusters."""
    path = tmp_path / "mine.json"
    for turn, resume in ((0, ""), (1, ""), (2, "a")):
        path.write_text(json.dumps({f"k{i}": i > turn for i in range(8)}))
        found = opened(tmp_path / "a", made(CAPTIONS), path, resume=resume)
        assert found.sizes.tolist() == ([7, 1], [6, 2], [6, 2])[turn]  # a resumed run keeps those it has


def test_examples_without_a_cluster_are_counted_once(tmp_path):
    """However many captions they have, and as many rows unfolded."""
    label = np.array([0, 0, 1, 1, 1, -1, -1, -1])
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({f"k{i}": int(y) for i, y in enumerate(label) if y >= 0}))
    for name, data in (("rows", made(CAPTIONS, label=label)), ("unfolded", made(CAPTIONS, label=label).unfold())):
        for source in ("label", path):
            found = opened(tmp_path / name, data, source)
            assert (found.sizes.tolist(), found.meta["without"]) == ([3, 2], 3)


# ---------------------------------------------------- encoders of clusters ------------------------------------------
@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """Folders of tiny models: bert, clip, and a bert with a weight that is not a number."""
    root = tmp_path_factory.mktemp("encoders")
    tokenizer = Tokenizer(common.train_wordpiece([c for row in CAPTIONS for c in row]), 12)
    reference = {kind: tiny_model(kind, root / kind, tokenizer) for kind in ("bert", "clip")}
    broken = tiny_model("bert", root / "broken", tokenizer)
    broken.embeddings.LayerNorm.weight.data.fill_(math.nan)
    broken.save_pretrained(root / "broken")
    return root, tokenizer, reference


def test_a_text_encoder_is_mean_pooled_and_a_clip_its_own(encoders):
    root, tokenizer, reference = encoders
    texts = ["a red apple here", "pear"]
    tokens = tokenizer(texts)
    states, keep = reference["bert"](**tokens).last_hidden_state, tokens["attention_mask"][..., None]
    expected = F.normalize((states * keep).sum(1) / keep.sum(1), dim=1)
    found = SentenceEncoder(str(root / "bert"), torch.device("cpu"))(texts)
    assert torch.allclose(found, expected, atol=1e-5)
    expected = F.normalize(reference["clip"].get_text_features(**tokens).pooler_output, dim=1)
    assert torch.allclose(SentenceEncoder(str(root / "clip"), torch.device("cpu"))(texts), expected, atol=1e-5)


def test_clusters_of_encoders(encoders, tmp_path):
    root, _, _ = encoders
    found = opened(tmp_path / "text", made(CAPTIONS), "captions", encoder=str(root / "bert"))
    assert found.sizes.sum() == 16 and found.tensors["centroids"].shape == (len(found.sizes), 24)
    train = made(CAPTIONS)
    train.pixels.copy_((torch.arange(8) % 2 * 255).view(8, 1, 1, 1))  # black and white
    for data in (train.unfold(), train):
        pictures = opened(tmp_path / "pictures", data, "vision", k=2, encoder=str(root / "clip"), image_size=32)
        assert pictures.sizes.tolist() == [4, 4] and pictures.meta["without"] == 0
    labels, _ = pictures.look_up([f"k{i}" for i in range(8)], [""] * 8)
    assert labels[::2].unique().numel() == labels[1::2].unique().numel() == 1 and labels[0] != labels[1]
    with pytest.raises(UserError, match="--clusters captions: Input X contains NaN"):
        opened(tmp_path / "nan", made(CAPTIONS), "captions", encoder=str(root / "broken"))
    with pytest.raises(UserError, match="--cluster-encoder .*bert"):
        opened(tmp_path / "no", train, "vision", encoder=str(root / "bert"))
    with pytest.raises(UserError, match="tf-idf: Unknown model"):
        opened(tmp_path / "no", train, "vision")
    with pytest.raises(UserError, match="nobody/nothing: "):
        opened(tmp_path / "no", train, "captions", encoder="nobody/nothing")


# ---------------------------------------------------- whole runs ----------------------------------------------------
def main(folder, *flags, pictures=False):
    return run_script(mmts, folder, *flags, base=TINY, pictures=pictures)


def resume(folder, last):
    """To step `last`."""
    return mmts.main(mmts.parse_args(["--resume", str(folder), "--max-steps", str(last)]))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A default run with its pictures: (folder, summary)."""
    folder = tmp_path_factory.mktemp("runs") / "default"
    return folder, main(folder, pictures=True)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("runs") / "short"
    main(folder, "--max-steps", 2)
    return folder


def test_what_a_run_leaves(run):
    folder, summary = run
    pictures = {"curves", "evaluation", "retrieval", "temperatures", "distribution", "tsne", "clusters"}
    assert {p.stem for p in folder.glob("*.png")} == pictures
    meta = json.loads((folder / "clusters.json").read_text())
    assert len(meta["sizes"]) == 12 and sum(meta["sizes"]) == 64 * 3
    assert len(meta["examples"][0]["captions"]) == 5 and meta["examples"][0]["size"] == max(meta["sizes"])
    thirds = summary["test"]["moving-emoji"]["by_cluster_size"]
    assert list(thirds) == ["head", "mid", "tail"] and sum(t["queries"] for t in thirds.values()) == 24 * 3
    assert thirds["head"]["from"] > thirds["mid"]["to"] and thirds["mid"]["from"] > thirds["tail"]["to"]
    assert 0 < summary["test"]["moving-emoji"]["mir"]["mAP"] < 100
    for row in steps(folder):
        assert row["loss"] == pytest.approx((row["L_v2t"] + row["L_t2v"]) / 2, rel=1e-5)
        assert row["tau_min"] <= row["tau_mean"] == row["tau"] <= row["tau_max"] and row["not_in_clusters"] == 0


def test_eval_evaluates_it(run, tmp_path):
    folder, summary = run
    result = eval_py.main(eval_py.parse_args(["--checkpoint", str(folder), "--cpu",
                                              "--tasks", "retrieval", "--output-dir", str(tmp_path)]))
    found = result["datasets"]["moving-emoji"]["metrics"]
    assert found["text_to_image"] == summary["test"]["moving-emoji"]["text_to_image"]


@pytest.mark.parametrize("words, name, low, high", [
    ("--shift-min 0.05 --shift-max 0.2", "tau", 0.05, 0.2),
    ("--shift-min 0.05 --shift-max 0.2 --loss max-margin", "margin", 0.05, 0.2),
    ("--no-shifts --tau 0.07", "tau", 0.07, 0.07)])
def test_logged_range_is_the_arithmetic_of_the_flags(words, name, low, high, tmp_path):
    """All 64 clips in a batch, verbs for clusters: every step sees the smallest and the largest class."""
    main(tmp_path / "a", *f"--batch-size 64 --clusters verb --alpha 0.06 --periods 1.25 --max-steps 5 {words}".split())
    for row, swing in zip(steps(tmp_path / "a"), [0.03, 0, -0.03, 0, 0.03], strict=True):
        assert (row[f"{name}_min"], row[f"{name}_max"]) == pytest.approx((low + swing, high + swing), abs=1e-6)


def test_the_rows_of_tables_4_and_9_are_eight_runs(tmp_path, capsys):
    seen, guesses = set(), {}
    for loss in ("infonce", "max-margin"):
        for schedule in ("--schedule", "--no-schedule"):
            for shifts in ("--shifts", "--no-shifts"):
                name = f"{loss}{schedule}{shifts}"
                main(tmp_path / name, "--loss", loss, schedule, shifts, "--max-steps", 2)
                seen.add(tuple(losses(tmp_path / name)))
                guesses[name] = capsys.readouterr().out.split("random guess loss ")[1].split("\n")[0]
    assert len(seen) == 8
    assert guesses["max-margin--no-schedule--no-shifts"] == "0.200"
    assert guesses["max-margin--schedule--no-shifts"].startswith("0.300")
    assert all(g == "3.466" for name, g in guesses.items() if name.startswith("infonce"))


@pytest.mark.parametrize("words", [
    "--alpha 0.02", "--shift-min 0.06", "--shift-max 0.2", "--periods 2", "--label-smoothing 0.1",
    "--num-clusters 5", "--clusters noun", "--chunk-size 5"])
def test_every_flag_acts(words, short, tmp_path):
    main(tmp_path / "a", *words.split(), "--max-steps", 2)
    ours, default = losses(tmp_path / "a"), losses(short)
    if words.startswith("--chunk"):
        assert ours == pytest.approx(default, rel=1e-3)
    else:
        assert ours[1] != default[1] and (ours[0] != default[0]) != words.startswith("--period")  # step 0: the top


def test_learnable_tau_moves_within_its_limits(tmp_path, capsys):
    main(tmp_path / "a", *"--no-schedule --no-shifts --learnable-tau --clusters none --tau 0.0101".split())
    assert "tau 0.0101, learnt\n" in capsys.readouterr().out
    taus = [r["tau"] for r in steps(tmp_path / "a")]
    assert len(set(taus)) > 1 and min(taus) >= 0.01 - 1e-6
    assert not (tmp_path / "a" / "clusters.json").exists()
    tau = load_file(tmp_path / "a" / "own.safetensors")["tau.log_tau"].exp().item()
    assert tau == pytest.approx(taus[-1], rel=1e-6)


def test_a_resumed_run_keeps_its_clusters(short, tmp_path, capsys):
    """Refused before anything is written: without the flag the run goes on."""
    import shutil
    folder = shutil.copytree(short, tmp_path / "a")
    for flag in ("--num-clusters 9", "--clusters verb", "--cluster-encoder some/model"):
        words = refused(mmts.parse_args, ["--resume", str(folder), *flag.split()], capsys)
        assert f"error: --resume {folder}: {flag.split()[0]} cannot change" in words
    before = (folder / "clusters.json").read_bytes()
    assert resume(folder, 3)["steps"] == 3
    assert (folder / "clusters.json").read_bytes() == before


def test_a_second_try_in_the_same_folder_may_have_other_data(tmp_path, capsys):
    with pytest.raises(UserError, match="--clusters captions: n_samples=.* should be >= n_clusters=999"):
        main(tmp_path / "a", "--num-clusters", 999)
    main(tmp_path / "a", "--clips", 60, 24, 24, "--clusters", "verb", "--periods", 4, "--max-steps", 1)
    words = capsys.readouterr().out
    assert "period 0.25 steps" in words and "60 training examples" in words


def test_a_cluster_file_decides(tmp_path):
    train = common.load_data("moving-emoji", "train", clips=[64, 24, 24], image_size=16)
    verbs = train.column("verb")
    names = train.names("verb")
    (tmp_path / "verbs.json").write_text(json.dumps({train.key(i): names[v] for i, v in enumerate(verbs)}))
    turned = np.roll(verbs, 1)
    (tmp_path / "turned.json").write_text(json.dumps({train.key(i): names[v] for i, v in enumerate(turned)}))
    for name, source in (("verb", "verb"), ("file", tmp_path / "verbs.json"), ("turned", tmp_path / "turned.json")):
        main(tmp_path / name, "--clusters", source, "--max-steps", 2)
    assert losses(tmp_path / "verb") == losses(tmp_path / "file")
    assert all(a != b for a, b in zip(losses(tmp_path / "verb"), losses(tmp_path / "turned"), strict=True))
    (tmp_path / "turned.json").unlink()  # a resumed run has its clusters
    assert resume(tmp_path / "turned", 3)["steps"] == 3


def test_examples_without_a_cluster_are_said_and_counted(tmp_path, capsys):
    train = common.load_data("moving-emoji", "train", clips=[64, 24, 24], image_size=16)
    known = {train.key(i): str(int(v)) for i, v in enumerate(train.column("verb")) if i % 2}
    (tmp_path / "half.json").write_text(json.dumps(known))
    main(tmp_path / "a", "--clusters", tmp_path / "half.json", "--max-steps", 2, "--batch-size", 64, "--no-schedule")
    assert "left out     32 without a cluster are treated as in the smallest" in capsys.readouterr().out
    assert [r["not_in_clusters"] for r in steps(tmp_path / "a")] == [32, 32]
    assert steps(tmp_path / "a")[0]["tau_min"] == pytest.approx(0.08)


def test_figure_3_has_a_fork_s_temperature(tmp_path, monkeypatch):
    """The lines of the clusters swing as the script's own sample_temperature does, which the loss has."""
    own = helpers.fork(mmts, tmp_path, "return shift + base_temperature(step, period, alpha)",
                       "return shift + step / 100")
    for name, script in (("ours", mmts), ("fork", own)):
        drawn = []
        monkeypatch.setattr(figures.mmts, "save_figure", lambda *args, drawn=drawn: drawn.append(args))
        script.main(script.parse_args([*TINY, "--output-dir", str(tmp_path), "--run-name", name]))
        args = json.loads((tmp_path / name / "args.json").read_text())
        low, high, alpha = args["shift_min"], args["shift_max"], args["alpha"]
        swings = [t / 100 for t in range(5)] if script is own else [
            alpha / 2 * math.cos(2 * math.pi * t * args["periods"] / 4) for t in range(5)]
        for row, swing in zip(steps(tmp_path / name), swings):
            assert low - 1e-6 <= row["tau_min"] - swing <= row["tau_max"] - swing <= high + 1e-6
        largest, *_, smallest = helpers.panel(drawn, "(Fig. 3)").lines
        for line, shift in ((largest, high), (smallest, low)):
            values = dict(zip(line.get_xdata(), line.get_ydata()))
            assert [values[t] - shift for t in range(5)] == pytest.approx(swings, abs=1e-6)


def test_equal_clusters_have_the_lowest_shift(tmp_path, capsys):
    train = common.load_data("moving-emoji", "train", clips=[64, 24, 24], image_size=16)
    (tmp_path / "two.json").write_text(json.dumps({train.key(i): i % 2 for i in range(64)}))
    main(tmp_path / "a", "--clusters", tmp_path / "two.json", "--max-steps", 2, "--no-schedule")
    assert "largest 32, smallest 32" in capsys.readouterr().out
    assert all(r["tau_min"] == r["tau_max"] == pytest.approx(0.08) for r in steps(tmp_path / "a"))


def test_own_images_with_new_captions_on_the_way(tmp_path, monkeypatch):
    """Captions that were not there when the clusters were made take the nearest centroid, and are counted."""
    csv = write_captions(tmp_path / "set", 60)
    real = common.pick
    monkeypatch.setattr(common, "pick", lambda *a: [f"{t} new" for t in real(*a)])
    main(tmp_path / "a", "--dataset", csv, "--batch-size", 16, "--max-steps", 2, "--workers", 0)
    assert [r["not_in_clusters"] for r in steps(tmp_path / "a")] == [16, 16]


def test_tau_is_that_of_the_caption_that_was_encoded(tmp_path, monkeypatch):
    """With captions from another file, and bad images that others replace."""
    csv = write_captions(tmp_path / "set", 60)
    images = sorted(p for p in (tmp_path / "set").iterdir() if p != csv)
    for path in images[3:6]:
        path.write_bytes(b"no image")
    extra = write_rows(tmp_path / "extra.csv", ["image", "caption"], [(p.name, f"zebra {p.stem}") for p in images])
    drawn, shifts, pick, value = [], [], common.pick, mmts.sample_temperature
    monkeypatch.setattr(common, "pick", lambda *a: (drawn.append(pick(*a)), pick(*a))[1])
    monkeypatch.setattr(mmts, "sample_temperature", lambda t, s, *a: (shifts.append((t, s)), value(t, s, *a))[1])
    summary = main(tmp_path / "a", "--dataset", csv, "--extra-captions", extra, "--batch-size", 15, "--workers", 0,
                   "--max-bad-fraction", 0.2)
    assert summary["bad_samples"] > 0
    tensors, meta = (load_file(tmp_path / "a" / "clusters.safetensors"),
                     json.loads((tmp_path / "a" / "clusters.json").read_text()))
    place = {number: c for number, c in zip(tensors["ids"].tolist(), tensors["labels"].tolist(), strict=True)}
    low, high = meta["sizes"][-1], meta["sizes"][0]
    found = [(t, s) for t, s in shifts if torch.is_tensor(s) and s.ndim and len(s) == 15]
    assert [t for t, _ in found] == [0, 1, 2, 3] and any("zebra" in c for texts in drawn for c in texts)
    for texts, (_, shift) in zip(drawn, found, strict=True):
        sizes = [meta["sizes"][place[common.key_hash(c)]] for c in texts]
        assert shift.tolist() == pytest.approx([0.08 + 0.04 * (k - low) / (high - low) for k in sizes])


def test_streams_cluster_their_first_captions(tmp_path, capsys):
    for k in range(2):
        samples = helpers.tar_samples(range(20 * k, 20 * k + 20), "png", "txt")
        helpers.write_tar(tmp_path / "set" / f"train-{k}.tar", samples)
    val = write_captions(tmp_path / "val", 8)
    main(tmp_path / "a", "--dataset", tmp_path / "set", "--streaming", "--batch-size", 8, "--max-steps", 2,
         "--workers", 0, "--eval-datasets", val)
    assert sum(json.loads((tmp_path / "a" / "clusters.json").read_text())["sizes"]) == 40  # of the shard not held out
    assert "clusters: of the 40 captions of the stream's first 20,000 samples; " in capsys.readouterr().out
    with pytest.raises(UserError, match="--clusters noun: a stream has only captions"):
        main(tmp_path / "b", "--dataset", tmp_path / "set", "--streaming", "--clusters", "noun")


OWN_TOWERS = ["--image-encoder", "small", "--text-encoder", "small", "--no-pretrained", "--image-stats", "half",
              "--mixed-precision", "no"]


def test_youcook2_with_real_clips(tmp_path, capsys):
    """The annotation file as it is published and three mp4s, with small towers in the recipe's place."""
    steps = ["add the red apple", "cut a green pear", "mix the salt", "fry the blue egg"]
    database = {}
    for number, (video, subset) in enumerate((("aa", "training"), ("bb", "training"), ("cc", "validation"))):
        write_video(tmp_path / "videos" / f"{video}.mp4", [4 * number + k for k in range(12)], fps=4)
        segments = [{"id": k, "segment": [k / 2, k / 2 + 1], "sentence": s} for k, s in enumerate(steps)]
        database[video] = {"subset": subset, "duration": 3.0, "annotations": segments}
    (tmp_path / "youcookii_annotations_trainval.json").write_text(json.dumps({"database": database}))
    few = "--frames 2 --batch-size 8 --num-clusters 3 --cluster-encoder tf-idf --workers 0 --max-steps 2"
    summary = main(tmp_path / "run", "--dataset", "youcook2", "--data-dir", tmp_path, "--video-dir",
                   tmp_path / "videos", *OWN_TOWERS, *few.split())
    words = capsys.readouterr().out
    assert "infonce, schedule and shifts (MM-TS), label smoothing 0.1" in words
    assert "tau 0.03 .. 0.12 over the run" in words and "(paper: VAST" in words
    assert summary["test"]["youcook2"]["images"] == 4 and summary["bad_samples"] == 0
    assert json.loads((tmp_path / "run" / "clusters.json").read_text())["sizes"] == [4, 2, 2]

    shutil.rmtree(tmp_path / "videos")                                     # clusters need only the words
    several.main(["clusters", "mmts.py", "--dataset", "youcook2", "--data-dir", str(tmp_path), "--output-dir",
                  str(tmp_path), "--run-name", "words", "--cpu", *few.split()])
    found = {p.name: p.read_bytes() for p in (tmp_path / "words").iterdir()}
    pictures = {f"{name}.png" for name in ("temperatures", "distribution", "tsne", "clusters")}
    assert {*found} == pictures | {"clusters.json", "clusters.safetensors"}
    assert found["clusters.safetensors"] == (tmp_path / "run" / "clusters.safetensors").read_bytes()
    words = capsys.readouterr().out
    assert re.search("^#1 of 3, 4: .*; .*\n#2 of 3, 2: .*\n#3 of 3, 2: ", words, re.M)


def test_epic_kitchens_with_real_clips(tmp_path, capsys, monkeypatch):
    """A replica of its files: captions by relevancy, the shift by the clip's own noun, MIR at the end."""
    import test_epic
    for split in ("train", "test"):
        test_epic.write_annotations(tmp_path, split)
    write_video(tmp_path / "videos" / "P01_01.MP4", range(225), fps=5)
    write_video(tmp_path / "videos" / "P02_03.MP4", range(30), fps=5)
    said = []
    monkeypatch.setattr(common, "pick", lambda captions, u, real=common.pick: (
        said.append(captions), real(captions, u))[1])
    few = "--frames 2 --batch-size 6 --workers 0 --max-steps 3 --alpha 0"
    summary = main(tmp_path / "run", "--dataset", "epic-kitchens-100", "--data-dir", tmp_path, "--video-dir",
                   tmp_path / "videos", *OWN_TOWERS, *few.split())
    assert "clusters     2, by noun; largest 5, smallest 1" in capsys.readouterr().out
    assert "mir" in summary["test"]["epic-kitchens-100"]
    assert [(r["margin_min"], r["margin_max"]) for r in steps(tmp_path / "run")] == [
        pytest.approx((0.17, 0.3))] * 3
    drawn = [c[0] for batch in said for c in batch]
    assert len(drawn) == 18 and len({tuple(sorted(c[0] for c in batch)) for batch in said}) > 1  # each epoch draws


def test_ssv2_lt_with_real_clips(tmp_path, capsys):
    import test_video_sets
    test_video_sets.write_ssv2(tmp_path, "train", range(100, 108), range(100, 108))
    test_video_sets.write_ssv2(tmp_path, "val", [200, 201], [200, 201])
    for i in (*range(100, 108), 200, 201):
        write_video(tmp_path / "clips" / f"{i}.webm", range(i - 90, i - 84), "libvpx-vp9", 12)
    summary = main(tmp_path / "run", "--dataset", "ssv2-lt", "--data-dir", tmp_path, "--video-dir", tmp_path / "clips",
                   *OWN_TOWERS, *"--frames 2 --batch-size 8 --workers 0 --max-steps 2".split())
    words = capsys.readouterr().out
    assert "ssv2-lt: 2 test" in words  # and no val: its file is not there
    assert "by label; largest" in words and "(paper: a cell of Table 8; Table 7 does not say)" in words
    assert summary["test"]["ssv2-lt"]["images"] == 2 and summary["bad_samples"] == 0


def test_no_column_and_no_group(tmp_path):
    csv = write_rows(tmp_path / "x.csv", ["image", "caption"], [(f"{i}.png", "a") for i in range(30)])
    with pytest.raises(UserError, match="--clusters verb: .* has no verb; --clusters captions needs none"):
        main(tmp_path / "a", "--dataset", csv, "--clusters", "verb")
    assert not (tmp_path / "a").exists()  # before there is a run


# ---------------------------------------------------- several processes ---------------------------------------------
def test_two_processes_are_one(run, tmp_path):
    launch.finish("mmts", [*TINY, "--output-dir", tmp_path, "--run-name", "two"], tmp_path / "log", processes=2)
    one, two = steps(run[0]), steps(tmp_path / "two")
    for a, b in zip(one, two, strict=True):
        for name in ("loss", "L_v2t", "L_t2v", "tau", "tau_min", "tau_mean", "tau_max"):
            assert b[name] == pytest.approx(a[name], rel=1e-3), name
    assert equal_files(*(f / "clusters.safetensors" for f in (run[0], tmp_path / "two")))
