"""Clusters of captions, classes and pictures (MM-TS)."""

import functools
import json
import math
from types import SimpleNamespace

import common
from contrastive.core.processes import UserError
from contrastive.encoders.sentences import SentenceEncoder
from contrastive.evaluation.pieces import EvaluationPieces
from contrastive.papers import clusters as clusters_module
from contrastive.papers.clusters import Clusters, centroids, largest_first, name_of_class

import numpy as np
import pytest
import torch

import mmts
from helpers import CPU, unit

KINDS = ["a red apple", "the green pear", "some blue birds"]
CAPTIONS = [[f"{KINDS[i % 3]} {w}" for w in ("here", "there")] for i in (0, 0, 0, 0, 1, 1, 1, 2)]


# ------------------------------------------ K-Means and sizes ------------------------------------
def test_cluster_captions_finds_blobs_largest_first():
    truth = torch.repeat_interleave(torch.arange(4), torch.tensor([10, 40, 5, 20]))
    x = torch.eye(4)[truth] + 0.05 * torch.randn(75, 4, generator=torch.Generator().manual_seed(0))
    labels, sizes = mmts.cluster_captions(x, 4, seed=0)
    assert sizes.tolist() == [40, 20, 10, 5] == labels.bincount().tolist()
    assert all(len(labels[truth == c].unique()) == 1 for c in range(4))
    assert torch.equal(labels, mmts.cluster_captions(x, 4, seed=0)[0])


def test_cluster_captions_weights_each_by_its_count():
    labels, sizes = mmts.cluster_captions(torch.eye(4), 4, seed=0, counts=[3, 1, 9, 2])
    assert sizes.tolist() == [9, 3, 2, 1]
    assert labels.tolist() == [1, 3, 0, 2]


def test_cluster_captions_refuses_nan():
    with pytest.raises(ValueError, match="NaN"):
        mmts.cluster_captions(torch.tensor([[1.0, 0]] * 4 + [[math.nan, 0]]), 2, 0)


def test_largest_first():
    labels, sizes, names = largest_first(["b", "a", "b", "c", "b", "c"])
    assert labels.tolist() == [0, 2, 0, 1, 0, 1]
    assert sizes.tolist() == [3, 2, 1]
    assert names == ["b", "c", "a"]


def test_centroids():
    x, labels = unit(6, 3).float(), torch.tensor([0, 2, 0, 1, 0, 1])
    means = torch.stack([x[labels == c].mean(0) for c in range(3)])
    assert torch.allclose(centroids(x, labels), means)
    weighted = centroids(x, labels, [2, 1, 1, 1, 1, 1])[0]
    assert torch.allclose(weighted, (2 * x[0] + x[2] + x[4]) / 4)


# ------------------------------------------ clusters of data -------------------------------------
def made(captions, **columns):
    """Data with a row for each list of captions."""
    classes = None
    if "noun" in columns:
        classes = {"noun": ["cat", "dog", "owl"]}
    keys = [f"k{i}" for i in range(len(captions))]
    table = common.make_table(captions, keys, classes=classes, **columns)
    pixels = torch.zeros(len(captions), 3, 8, 8, dtype=torch.uint8)
    return common.Data("made", "train", table, pixels=pixels)


def opened(folder, train, source, **flags):
    """The clusters of these data, by the flags of mmts.py."""
    folder.mkdir(exist_ok=True)
    defaults = dict(clusters=str(source), cluster_encoder="tf-idf", num_clusters=3, seed=0)
    defaults.update(dataset="made", image_size=16, workers=0, resume="")
    args = SimpleNamespace(**defaults | flags)
    clusters_module.check_clusters(train, args)
    kmeans = functools.partial(mmts.cluster_captions, seed=args.seed)
    return clusters_module.open_clusters(folder, args, train, CPU, kmeans)


def test_captions_are_looked_up_by_their_words(tmp_path):
    train = made([*CAPTIONS, CAPTIONS[7]])  # the last one says what the one before it says
    clusters = opened(tmp_path / "a", train, "captions")
    assert clusters.kind == "caption"
    assert clusters.sizes.tolist() == [8, 6, 4]
    texts = ["some blue birds there", "a red apple here", "the green pear here"]
    labels, num_missing = clusters.look_up(["", "x", "y"], texts)
    assert labels.tolist() == [2, 0, 1]
    assert num_missing == 0
    unfolded = opened(tmp_path / "b", train.unfold(), "captions")
    assert torch.equal(unfolded.tensors["labels"], clusters.tensors["labels"])
    examples = json.loads((tmp_path / "a" / "clusters.json").read_text())["examples"]
    assert [e["size"] for e in examples] == [8, 6, 4]
    assert all("apple" in c for c in examples[0]["captions"])


def test_a_new_caption_has_the_cluster_of_the_nearest_centroid(tmp_path):
    """In the process that made the clusters, and in another one that reads them."""
    clusters = opened(tmp_path / "a", made(CAPTIONS), "captions")
    for same in (clusters, Clusters(tmp_path / "a", CPU)):
        labels, num_missing = same.look_up(["", ""], ["green pear", "blue birds, blue birds"])
        assert labels.tolist() == [1, 2]
        assert num_missing == 2


NOUNS = np.array([0, 0, 0, 2, 2, 1, -1, 0])


def test_classes_are_counted(tmp_path):
    train = made(CAPTIONS, noun=NOUNS)
    clusters = opened(tmp_path, train, "noun")
    assert clusters.sizes.tolist() == [4, 2, 1]
    assert clusters.meta["names"] == ["cat", "owl", "dog"]
    assert clusters.meta["without"] == 1
    labels, num_missing = clusters.look_up([f"k{i}" for i in range(8)] + ["new"], [""] * 9)
    assert labels.tolist() == [0, 0, 0, 1, 1, 2, -1, 0, -1]
    assert num_missing == 2


def test_classes_of_two_columns(tmp_path):
    train = made(CAPTIONS, noun=NOUNS, verb=np.array([1, 1, 2, 1, 1, 1, 1, 1]))
    clusters = opened(tmp_path, train.unfold(), "verb-noun")
    assert clusters.sizes.tolist() == [3, 2, 1, 1]
    assert clusters.meta["names"][0] == "1 cat"
    assert clusters.meta["without"] == 1


def test_thirds_of_queries_are_by_the_size_of_their_class(tmp_path):
    clusters = opened(tmp_path, made(CAPTIONS, noun=NOUNS), "noun")
    nouns = [0, 2, 1, -1, 0, 2, 1, 0]  # cat, owl, dog, none: of 4, 2 and 1 training examples
    x, y = unit(8, 5).float(), unit(8, 5, seed=1).float()
    pieces = EvaluationPieces(
        owner=np.arange(8),
        index=np.arange(8),
        positives=torch.arange(8)[:, None],
        texts=["x"] * 8,
        data=made([["x"]] * 8, noun=np.array(nouns)),
        text=x,
        image=y,
    )
    assert clusters.query_labels(pieces).tolist() == [0, 1, 2, -1, 0, 1, 2, 0]
    ranks = [sum(float(x[i] @ y[j]) >= float(x[i] @ y[i]) for j in range(8)) for i in range(8)]
    thirds = clusters_module.head_mid_tail(pieces, clusters)["by_cluster_size"]
    for name, noun, size in (("head", 0, 4), ("mid", 2, 2), ("tail", 1, 1)):
        third = thirds[name]
        expected = [rank for rank, n in zip(ranks, nouns, strict=True) if n == noun]
        assert third["MnR"] == pytest.approx(sum(expected) / len(expected))
        assert (third["from"], third["to"], third["queries"]) == (size, size, len(expected))


def test_sentences_are_mean_pooled(tiny, tokenizer):
    texts, (folder, model) = ["a red apple here", "pear"], tiny("bert")
    tokens = tokenizer(texts)
    states, mask = model(**tokens).last_hidden_state, tokens["attention_mask"][..., None]
    expected = common.normalize((states * mask).sum(1) / mask.sum(1))
    assert torch.allclose(SentenceEncoder(folder, CPU)(texts), expected, atol=1e-5)


def test_clusters_of_pictures(tiny, tmp_path):
    train = made(CAPTIONS)
    train.pixels.copy_((torch.arange(8) % 2 * 255).view(8, 1, 1, 1))  # black and white
    flags = dict(num_clusters=2, cluster_encoder=tiny("clip")[0], image_size=32)
    for data in (train.unfold(), train):
        clusters = opened(tmp_path / "pictures", data, "vision", **flags)
        assert clusters.sizes.tolist() == [4, 4]
        assert clusters.meta["without"] == 0
    labels, _ = clusters.look_up([f"k{i}" for i in range(8)], [""] * 8)
    assert labels[::2].unique().numel() == labels[1::2].unique().numel() == 1
    assert labels[0] != labels[1]


NO_CLUSTERS = [  # source, data, words of the one line
    ("noun", made(CAPTIONS), "--clusters noun: made has no noun; --clusters captions needs none"),
    (
        "noun",
        made(CAPTIONS, noun=np.full(8, -1)),
        "--clusters noun: no example of made has a cluster",
    ),
    ("none.json", made(CAPTIONS), "none.json: .*No such file"),
    ("captions", made([["?"], ["!"], ["."]]), "--cluster-encoder tf-idf: empty vocabulary"),
]


@pytest.mark.parametrize("source, data, words", NO_CLUSTERS)
def test_what_makes_no_clusters_is_refused_in_one_line(source, data, words, tmp_path):
    with pytest.raises(UserError, match=f"^.*{words}.*$"):
        opened(tmp_path / "out", data, source)
    assert not (tmp_path / "out" / "clusters.json").exists()


def test_an_encoder_without_trained_weights_makes_no_clusters(tmp_path):
    with pytest.raises(UserError, match="--cluster-encoder small: it has no trained weights"):
        opened(tmp_path / "out", made(CAPTIONS), "vision", cluster_encoder="small")


@pytest.mark.parametrize("value", [None, math.nan, -1])
def test_rows_without_a_class_have_no_name(value):
    assert name_of_class(value, ["cat", "dog"]) is None
