"""Clusters of captions, classes and pictures (MM-TS)."""

import functools
import math
from types import SimpleNamespace

import common
from contrastive.core.metrics import retrieval_ranks
from contrastive.core.processes import UserError
from contrastive.encoders.sentences import SentenceEncoder
from contrastive.evaluation.by_class import recall_by_frequency
from contrastive.evaluation.pieces import EvaluationPieces
from contrastive.papers import clusters as clusters_module
from contrastive.papers.clusters import Clusters, centroids

import numpy as np
import pytest
import torch

import mmts
from helpers import CPU, assert_close, unit

KINDS = ["a red apple", "the green pear", "some blue birds"]
CAPTIONS = []
for kind in (0, 0, 0, 0, 1, 1, 1, 2):
    CAPTIONS.append([f"{KINDS[kind]} here", f"{KINDS[kind]} there"])
NOUNS = np.array([0, 0, 0, 2, 2, 1, -1, 0])
KEYS = [f"k{i}" for i in range(8)]


# --------------------------------------- K-Means and sizes -----------------------------------
def test_cluster_captions_are_largest_first_by_their_counts():
    labels, sizes = mmts.cluster_captions(torch.eye(4), 4, seed=0, counts=[3, 1, 9, 2])
    assert sizes.tolist() == [9, 3, 2, 1]
    assert labels.tolist() == [1, 3, 0, 2]


def test_cluster_captions_refuses_nan():
    with pytest.raises(ValueError, match="NaN"):
        mmts.cluster_captions(torch.full((5, 2), math.nan), 2, 0)


def test_centroids_are_weighted_means():
    x = torch.eye(3)
    labels = torch.tensor([0, 1, 0])
    means = centroids(x, labels, counts=[3, 1, 1])
    assert_close(means, torch.tensor([[0.75, 0, 0.25], [0, 1, 0]]))


# ---------------------------------------- clusters of data -----------------------------------
def data_of(captions, **columns):
    """Data with a row for each list of captions."""
    classes = None
    if "noun" in columns:
        classes = {"noun": ["cat", "dog", "owl"]}
    keys = [f"k{i}" for i in range(len(captions))]
    table = common.make_table(captions, keys, classes=classes, **columns)
    pixels = torch.zeros(len(captions), 3, 8, 8, dtype=torch.uint8)
    return common.Data("own", "train", table, pixels=pixels)


def clusters_of(folder, train, source, encoder="tf-idf", num_clusters=3):
    """The clusters of these data, by the flags of mmts.py."""
    args = SimpleNamespace(
        clusters=source, cluster_encoder=encoder, num_clusters=num_clusters, seed=0,
        dataset="own", image_size=32, workers=0, resume="")
    clusters_module.check_clusters(train, args)
    kmeans = functools.partial(mmts.cluster_captions, seed=0)
    return clusters_module.open_clusters(folder, args, train, CPU, kmeans)


def test_captions_are_looked_up_by_their_words(tmp_path):
    train = data_of([*CAPTIONS, CAPTIONS[7]])  # the last two say the same
    clusters = clusters_of(tmp_path, train, "captions")
    assert clusters.sizes.tolist() == [8, 6, 4]
    texts = ["some blue birds there", "a red apple here", "the green pear here"]
    labels, num_missing = clusters.look_up(["", "x", "y"], texts)
    assert labels.tolist() == [2, 0, 1]
    assert num_missing == 0


def test_a_new_caption_has_the_cluster_of_the_nearest_centroid(tmp_path):
    """In the process that made the clusters, and in another one that reads them."""
    made = clusters_of(tmp_path, data_of(CAPTIONS), "captions")
    for clusters in (made, Clusters(tmp_path, CPU)):
        labels, num_missing = clusters.look_up(["", ""], ["green pear", "blue birds, blue birds"])
        assert labels.tolist() == [1, 2]
        assert num_missing == 2


def test_classes_are_counted_and_rows_without_a_class_have_none(tmp_path):
    clusters = clusters_of(tmp_path, data_of(CAPTIONS, noun=NOUNS), "noun")
    assert clusters.meta["names"] == ["cat", "owl", "dog"]
    assert clusters.sizes.tolist() == [4, 2, 1]
    assert clusters.meta["without"] == 1
    labels, num_missing = clusters.look_up([*KEYS, "new"], [""] * 9)
    assert labels.tolist() == [0, 0, 0, 1, 1, 2, -1, 0, -1]
    assert num_missing == 2


def test_classes_of_two_columns_count_clips(tmp_path):
    verbs = np.array([1, 1, 2, 1, 1, 1, 1, 1])
    train = data_of(CAPTIONS, noun=NOUNS, verb=verbs).unfold()
    clusters = clusters_of(tmp_path, train, "verb-noun")
    assert clusters.sizes.tolist() == [3, 2, 1, 1]
    assert clusters.meta["names"][0] == "1 cat"


def test_thirds_of_queries_are_by_the_size_of_their_class(tmp_path):
    clusters = clusters_of(tmp_path, data_of(CAPTIONS, noun=NOUNS), "noun")
    nouns = np.array([0, 2, 1, -1, 0, 2, 1, 0])  # cat, owl, dog, none: 4, 2 and 1 in training
    data = data_of([["x"]] * 8, noun=nouns)
    text = unit(8, 5).float()
    image = unit(8, 5, seed=1).float()
    rows = np.arange(8)
    positives = torch.from_numpy(rows)[:, None]
    pieces = EvaluationPieces(
        data, index=rows, image=image, text=text, texts=["x"] * 8, owner=rows,
        positives=positives)
    ranks = retrieval_ranks(text, image, positives)
    thirds = clusters_module.head_mid_tail(pieces, clusters)["by_cluster_size"]
    sizes = {name: third["from"] for name, third in thirds.items()}
    assert sizes == {"head": 4, "mid": 2, "tail": 1}
    ranks_of_cats = ranks[nouns == 0]
    ranks_of_dogs = ranks[nouns == 1]
    assert thirds["head"]["MnR"] == pytest.approx(ranks_of_cats.mean())
    assert thirds["tail"]["MnR"] == pytest.approx(ranks_of_dogs.mean())


def test_queries_of_one_frequency_stay_together_in_the_third_of_their_middle():
    ranks = np.ones(9)
    parts = recall_by_frequency(ranks, [9] * 8 + [1])
    sizes = {name: part["queries"] for name, part in parts.items()}
    assert sizes == {"mid": 8, "tail": 1}
    assert recall_by_frequency(ranks, [4] * 9) == {}


def test_sentences_are_mean_pooled(tiny, tokenizer):
    texts = ["a red apple here", "pear"]
    folder, model = tiny("bert")
    tokens = tokenizer(texts)
    mask = tokens["attention_mask"][..., None]
    states = model(**tokens).last_hidden_state
    means = (states * mask).sum(1) / mask.sum(1)
    expected = common.normalize(means.detach())
    assert_close(SentenceEncoder(folder, CPU)(texts), expected)


def test_clusters_of_pictures_count_each_once(tiny, tmp_path):
    train = data_of(CAPTIONS)
    train.pixels[1::2] = 255
    folder, _ = tiny("clip")
    clusters = clusters_of(tmp_path, train.unfold(), "vision", folder, num_clusters=2)
    assert clusters.sizes.tolist() == [4, 4]
    labels, _ = clusters.look_up(KEYS, [""] * 8)
    assert labels.tolist() in ([0, 1] * 4, [1, 0] * 4)


@pytest.mark.parametrize("source, captions, columns, words", [
    ("noun", CAPTIONS, {}, "--clusters noun: own has no noun"),
    ("noun", CAPTIONS, {"noun": NOUNS * 0 - 1}, "--clusters noun: no example of own has a cluster"),
    ("none.json", CAPTIONS, {}, "none.json: .*No such file"),
    ("captions", [["?"], ["!"]], {}, "--cluster-encoder tf-idf: empty vocabulary"),
])
def test_what_makes_no_clusters_is_refused(source, captions, columns, words, tmp_path):
    with pytest.raises(UserError, match=words):
        clusters_of(tmp_path, data_of(captions, **columns), source)
    assert not (tmp_path / "clusters.json").exists()


def test_an_encoder_without_trained_weights_makes_no_clusters(tmp_path):
    with pytest.raises(UserError, match="--cluster-encoder small: it has no trained weights"):
        clusters_of(tmp_path, data_of(CAPTIONS), "vision", "small")
