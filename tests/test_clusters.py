"""Clusters of captions, classes and pictures (MM-TS): K-Means, their sizes, who is in which, and thirds of queries."""

import functools
import json
import math
from types import SimpleNamespace

import common
from contrastive import evaluation
from contrastive.encoders.sentences import SentenceEncoder
from contrastive.engine.processes import UserError

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mmts
from helpers import unit

CPU = torch.device("cpu")
KINDS = ["a red apple", "the green pear", "some blue birds"]
CAPTIONS = [[f"{KINDS[i % 3]} {w}" for w in ("here", "there")] for i in (0, 0, 0, 0, 1, 1, 1, 2)]


def test_cluster_captions_finds_blobs_largest_first():
    sizes = torch.tensor([10, 40, 5, 20])
    truth = torch.repeat_interleave(torch.arange(4), sizes)
    x = torch.eye(4)[truth] + 0.05 * torch.randn(75, 4, generator=torch.Generator().manual_seed(0))
    labels, found = mmts.cluster_captions(x, 4, seed=0)
    assert found.tolist() == [40, 20, 10, 5] == labels.bincount().tolist()
    assert all(len(labels[truth == c].unique()) == 1 for c in range(4))
    assert torch.equal(labels, mmts.cluster_captions(x, 4, seed=0)[0])
    labels, found = mmts.cluster_captions(torch.eye(4), 4, seed=0, counts=[3, 1, 9, 2])  # weights count
    assert found.tolist() == [9, 3, 2, 1] and labels.tolist() == [1, 3, 0, 2]
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


def made(captions, **columns):
    table = common.make_table(captions, [f"k{i}" for i in range(len(captions))],
                              classes={"noun": ["cat", "dog", "owl"]} if "noun" in columns else None, **columns)
    return common.Data("made", "train", table, pixels=torch.zeros(len(captions), 3, 8, 8, dtype=torch.uint8))


def opened(folder, train, source, k=3, encoder="tf-idf", **more):
    folder.mkdir(exist_ok=True)
    args = SimpleNamespace(**{"clusters": str(source), "cluster_encoder": encoder, "num_clusters": k, "dataset": "made",
                              "seed": 0, "image_size": 16, "workers": 0, "resume": ""} | more)
    evaluation.clusters.check_source(train, args.clusters)
    kmeans = functools.partial(mmts.cluster_captions, k=k, seed=args.seed)
    return evaluation.clusters.open_clusters(folder, args, train, CPU, kmeans)


def test_captions_are_looked_up_by_their_words(tmp_path):
    train = made([*CAPTIONS, CAPTIONS[7]])  # the last one says what the one before it says
    found = opened(tmp_path / "a", train, "captions")
    assert found.sizes.tolist() == [8, 6, 4] and found.by == "caption"
    texts = ["some blue birds there", "a red apple here", "the green pear here"]
    assert found.look_up(["", "x", "y"], texts)[0].tolist() == [2, 0, 1] and found.look_up([""], texts[:1])[1] == 0
    unfolded = opened(tmp_path / "b", train.unfold(), "captions")
    assert torch.equal(unfolded.tensors["labels"], found.tensors["labels"]) and unfolded.sizes.tolist() == [8, 6, 4]
    for clusters in (found, evaluation.clusters.Clusters(tmp_path / "a", CPU)):  # another process: from the file
        labels, lost = clusters.look_up(["", ""], ["green pear", "blue birds, blue birds"])
        assert labels.tolist() == [1, 2] and lost == 2  # not there: nearest centroid
    examples = json.loads((tmp_path / "a" / "clusters.json").read_text())["examples"]
    assert [e["size"] for e in examples] == [8, 6, 4] and all("apple" in c for c in examples[0]["captions"])


def test_classes_are_counted(tmp_path):
    train = made(CAPTIONS, noun=np.array([0, 0, 0, 2, 2, 1, -1, 0]), verb=np.array([1, 1, 2, 1, 1, 1, 1, 1]))
    found = opened(tmp_path / "noun", train, "noun")
    assert found.sizes.tolist() == [4, 2, 1] and found.meta["names"] == ["cat", "owl", "dog"]
    labels, lost = found.look_up([f"k{i}" for i in range(8)] + ["new"], [""] * 9)
    assert labels.tolist() == [0, 0, 0, 1, 1, 2, -1, 0, -1] and lost == 2 and found.meta["without"] == 1
    pairs = opened(tmp_path / "pairs", train.unfold(), "verb-noun")
    assert pairs.sizes.tolist() == [3, 2, 1, 1] and pairs.meta["names"][0] == "1 cat"
    names = [0, 2, 1, -1, 0, 2, 1, 0]  # cat, owl, dog, none, ...: of 4, 2 and 1 training examples
    x, y = unit(8, 5).float(), unit(8, 5, seed=1).float()
    pieces = {"owner": np.arange(8), "index": np.arange(8), "positives": torch.arange(8)[:, None], "texts": ["x"] * 8,
              "data": made([["x"]] * 8, noun=np.array(names)), "text": x, "image": y}
    assert found.of_queries(pieces).tolist() == [0, 1, 2, -1, 0, 1, 2, 0]
    ranks = [sum(float(x[i] @ y[j]) >= float(x[i] @ y[i]) for j in range(8)) for i in range(8)]
    thirds = evaluation.clusters.head_mid_tail(pieces, found)["by_cluster_size"]
    for part, noun, size in (("head", 0, 4), ("mid", 2, 2), ("tail", 1, 1)):
        own = [r for r, n in zip(ranks, names, strict=True) if n == noun]
        assert thirds[part]["MnR"] == pytest.approx(sum(own) / len(own))
        assert (thirds[part]["from"], thirds[part]["to"], thirds[part]["queries"]) == (size, size, len(own))


def test_examples_without_a_cluster_are_counted_once(tmp_path):
    """However many captions they have, and as many rows unfolded."""
    label = np.array([0, 0, 1, 1, 1, -1, -1, -1])
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({f"k{i}": int(y) for i, y in enumerate(label) if y >= 0}))
    for name, data in (("rows", made(CAPTIONS, label=label)), ("unfolded", made(CAPTIONS, label=label).unfold())):
        for source in ("label", path):
            found = opened(tmp_path / name, data, source)
            assert (found.sizes.tolist(), found.meta["without"]) == ([3, 2], 3)


def test_an_earlier_try_leaves_no_clusters_to_a_new_run(tmp_path):
    """A folder with a --run-name in which nothing was trained is taken over, and so may hold other clusters."""
    path = tmp_path / "mine.json"
    for turn, resume in ((0, ""), (1, ""), (2, "a")):
        path.write_text(json.dumps({f"k{i}": i > turn for i in range(8)}))
        found = opened(tmp_path / "a", made(CAPTIONS), path, resume=resume)
        assert found.sizes.tolist() == ([7, 1], [6, 2], [6, 2])[turn]  # a resumed run keeps those it has


def test_a_text_encoder_is_mean_pooled_and_a_clip_its_own(tiny, tokenizer):
    texts = ["a red apple here", "pear"]
    tokens, ((bert, model), (clip, pair)) = tokenizer(texts), map(tiny, ("bert", "clip"))
    states, keep = model(**tokens).last_hidden_state, tokens["attention_mask"][..., None]
    pooled = F.normalize((states * keep).sum(1) / keep.sum(1), dim=1)
    own = F.normalize(pair.get_text_features(**tokens).pooler_output, dim=1)
    for name, expected in ((bert, pooled), (clip, own)):
        assert torch.allclose(SentenceEncoder(name, CPU)(texts), expected, atol=1e-5)


def test_clusters_of_pictures(tiny, tmp_path):
    train = made(CAPTIONS)
    train.pixels.copy_((torch.arange(8) % 2 * 255).view(8, 1, 1, 1))  # black and white
    for data in (train.unfold(), train):
        found = opened(tmp_path / "pictures", data, "vision", k=2, encoder=tiny("clip")[0], image_size=32)
        assert found.sizes.tolist() == [4, 4] and found.meta["without"] == 0
    labels, _ = found.look_up([f"k{i}" for i in range(8)], [""] * 8)
    assert labels[::2].unique().numel() == labels[1::2].unique().numel() == 1 and labels[0] != labels[1]


REFUSED = {  # --clusters, --cluster-encoder, number, captions: words
    ("noun", "tf-idf", 3): "--clusters noun: made has no noun; --clusters captions needs none",
    ("none.json", "tf-idf", 3): "none.json: .*No such file", ("[1]", "tf-idf", 3): "list",
    ("{", "tf-idf", 3): "Expecting", ('{"a": 1}', "tf-idf", 3): "no example of made has one",
    ("captions", "tf-idf", 7): "--clusters captions: n_samples=6 should be >= n_clusters=7",
    ("captions", "nobody/nothing", 3): "nobody/nothing: ", ("vision", "tf-idf", 2): "tf-idf: Unknown model",
    ("vision", "bert", 2): "--cluster-encoder .*bert"}


@pytest.mark.parametrize("source, encoder, k", REFUSED)
def test_what_makes_no_clusters_is_refused_in_one_line(source, encoder, k, tiny, tmp_path):
    if source[0] in "[{":
        (tmp_path / "mine.json").write_text(source)
    path = tmp_path / "mine.json" if source[0] in "[{" else source
    with pytest.raises(UserError, match=f"^.*{REFUSED[source, encoder, k]}.*$"):
        opened(tmp_path / "out", made(CAPTIONS), path, k, tiny("bert")[0] if encoder == "bert" else encoder)
    assert not (tmp_path / "out" / "clusters.json").exists()


def test_no_words_and_no_classes(tmp_path):
    with pytest.raises(UserError, match="--cluster-encoder tf-idf: empty vocabulary"):
        opened(tmp_path / "b", made([["?"], ["!"], ["."]]), "captions", k=2)
    with pytest.raises(UserError, match="--clusters noun: no example of made has one"):
        opened(tmp_path / "empty", made(CAPTIONS, noun=np.full(8, -1)), "noun")
