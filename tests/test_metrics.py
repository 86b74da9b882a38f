"""Metrics against computations by hand: ranks, ties, biases, groups, neighbours, probes, classes,
health of the space, chance."""

import functools
import itertools
import math
from types import SimpleNamespace

import common
from contrastive.core.metrics import recalls, retrieval_chance, retrieval_ranks
from contrastive.encoders.texts import Tokenizer, train_wordpiece
from contrastive.evaluation import by_class, retrieval
from contrastive.evaluation.pieces import EvaluationPieces

import numpy as np
import pandas
import pytest
import torch
import torch.nn.functional as F
from scipy.spatial.distance import pdist
from scipy.special import logsumexp
from sklearn.metrics import balanced_accuracy_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import LinearSVC

from helpers import CPU, unit

DIRECTIONS = ("text_to_image", "image_to_text")


def ranks_by_hand(sim, positives):
    """Rank of the best positive of each row; every tie stands before it."""
    ranks = []
    for row, padded in zip(sim.tolist(), positives.tolist()):
        right = [item for item in padded if item >= 0]
        best = max(row[item] for item in right)
        rank = 1
        for item, value in enumerate(row):
            if item not in right and value >= best:
                rank += 1
        ranks.append(rank)
    return np.array(ranks)


# ------------------------------------------ retrieval ----------------------------------------
@pytest.mark.parametrize("dsl", [0, 0.1])
def test_ranks_against_brute_force(dsl):
    """Of embeddings of any length, with one and with several positives. A bias is added to the
    cosine, or to the cosine times its softmax over all queries (dual softmax)."""
    torch.manual_seed(0)
    query = unit(40, 8).float()
    gallery = unit(15, 8, seed=1).float()
    bias = torch.linspace(-0.2, 0.2, 15)
    positives = torch.randint(15, (40, 3))
    positives[::2, 1:] = -1
    sim = query @ gallery.T
    if dsl:
        sim = sim * (sim / dsl).softmax(0)
    expected = ranks_by_hand(sim + bias, positives)
    inputs = 3 * query, 2 * gallery, positives, bias
    ranks = retrieval_ranks(*inputs, chunk=7, dsl=dsl)
    assert ranks.tolist() == expected.tolist()
    metrics = common.retrieval_metrics(*inputs, chunk=7, dsl=dsl)
    for k in (1, 5, 10, 50):
        recall = 100 * np.mean(expected <= k)
        assert metrics[f"R@{k}"] == pytest.approx(recall)
    assert metrics["MdR"] == np.median(expected)
    assert metrics["MnR"] == pytest.approx(expected.mean())


def test_dual_softmax_comes_before_the_best_item_of_each_group():
    torch.manual_seed(0)
    query = unit(40, 8).float()
    gallery = unit(15, 8, seed=1).float()
    positives = torch.randint(5, (40, 1))
    sim = query @ gallery.T
    sim = sim * (sim / 0.1).softmax(0)
    expected = ranks_by_hand(sim.view(40, 5, 3).amax(2), positives)
    ranks = retrieval_ranks(query, gallery, positives, groups=torch.arange(15) // 3, dsl=0.1)
    assert ranks.tolist() == expected.tolist()


def test_a_collapsed_model_is_last():
    same = torch.ones(100, 4)
    positives = torch.arange(100)[:, None]
    ranks = retrieval_ranks(same, same, positives)
    assert ranks.tolist() == [100] * 100


@pytest.mark.parametrize("name", ["query", "gallery", "bias"])
def test_input_that_is_not_finite_is_refused(name):
    inputs = {"query": torch.eye(3), "gallery": torch.eye(3), "bias": torch.zeros(3)}
    inputs[name][0] = math.nan
    positives = torch.arange(3)[:, None]
    with pytest.raises(ValueError, match=name):
        common.retrieval_metrics(positives=positives, **inputs)


def test_a_query_without_a_positive_is_refused():
    eye = torch.eye(3)
    positives = torch.tensor([[0], [1], [-1]])
    with pytest.raises(ValueError, match="no positive"):
        common.retrieval_metrics(eye, eye, positives)


@pytest.mark.parametrize("grouped", [False, True])
def test_both_directions_with_biases_and_groups(grouped):
    """Of four clips with three captions each; a grouped set ranks clips by their best caption,
    after the bias."""
    torch.manual_seed(2)
    image = unit(4, 8).float()
    text = unit(12, 8, seed=1).float()
    image_bias = torch.randn(4)
    text_bias = torch.randn(12)
    clips = torch.arange(12) // 3
    captions = torch.arange(12).view(4, 3)
    mean_rank = 13 / 4  # of the best of three captions among twelve
    pieces = EvaluationPieces(
        SimpleNamespace(grouped=grouped), image=image, text=text, owner=clips.numpy(),
        positives=clips[:, None], positives_of_image=captions)
    metrics, chance = retrieval.retrieval_both_ways(pieces, image_bias, text_bias)
    to_image = text @ image.T + image_bias
    to_text = image @ text.T + text_bias
    if grouped:
        to_text = to_text.unflatten(1, (4, 3)).amax(2)
        captions = torch.arange(4)[:, None]
        mean_rank = 5 / 2
    ranks = {
        "text_to_image": ranks_by_hand(to_image, clips[:, None]),
        "image_to_text": ranks_by_hand(to_text, captions),
    }
    for direction in DIRECTIONS:
        mean = ranks[direction].mean()
        assert metrics[direction]["MnR"] == pytest.approx(mean)
        assert chance[direction]["R@1"] == 25
    assert chance["image_to_text"]["MnR"] == mean_rank
    both = [metrics[direction] for direction in DIRECTIONS]
    means = pandas.DataFrame(both).mean()
    recall = (means["R@1"] + means["R@5"] + means["R@10"]) / 3
    assert metrics["R-Mean"] == pytest.approx(recall)
    # "Avg." of MM-TS's Table 1
    assert metrics["R@1-Mean"] == pytest.approx(means["R@1"])


def test_chance_is_the_mean_over_all_orders():
    """Of a query with one and of one with two positives among seven items."""
    ranks = []
    for places in itertools.permutations(range(1, 8)):
        ranks.append(places[0])
        ranks.append(min(places[:2]))
    positives = torch.tensor([[0, -1], [0, 1]])
    expected = recalls(np.array(ranks))
    assert retrieval_chance(positives, 7) == pytest.approx(expected)


def encoded_captions(data, image, monkeypatch, encode):
    """The pieces of data whose captions are encoded by `encode` of a list of texts."""
    monkeypatch.setattr(
        retrieval, "encode_texts", lambda model, tokenizer, texts, device: encode(texts))
    pieces = EvaluationPieces(data, np.arange(len(image)), image)
    tokenizer = SimpleNamespace(count_cut=len)  # each loses its end
    retrieval.encode_captions(pieces, None, tokenizer, CPU)
    return pieces


def letters(texts):
    """Unit vectors of the letters from a to z."""
    numbers = [ord(text) - ord("a") for text in texts]
    return torch.eye(26)[numbers]


def test_a_text_that_two_items_have_is_wrong_for_the_other_in_published_sets(monkeypatch):
    """Items 1 and 6 of eight say 'b': each ties with the other one, also of a perfect model."""
    captions = [*"abcdefbg"]
    table = common.make_table([[caption] for caption in captions], [*"01234567"])
    data = common.Data("own", "test", table, same_text="wrong")
    pieces = encoded_captions(data, letters(captions), monkeypatch, letters)
    metrics, chance = retrieval.retrieval_both_ways(pieces)
    assert pieces.num_repeated == 2
    assert pieces.num_cut == 8
    for direction in DIRECTIONS:
        assert metrics[direction]["R@1"] == 75
        assert chance[direction]["R@1"] == 100 / 8


def test_every_image_with_the_words_of_a_query_is_right_in_other_sets(monkeypatch):
    """Image 0 has the captions x and y, image 1 y, image 2 z; 3 and 4 are a group of z and w. Two
    images that are equally right do not tie with each other."""
    captions = [["x", "y"], ["y"], ["z"], ["z"], ["w"]]
    table = common.make_table(captions, [*"01234"], group=[0, 1, 2, 3, 3])
    data = common.Data("own", "test", table)
    pieces = encoded_captions(data, letters("xyzzw"), monkeypatch, letters)
    images_of_y = [0, 1]
    images_of_z = [2, 3, 4]
    images = [[0], images_of_y, images_of_y, images_of_z, images_of_z, [3, 4]]
    texts = [[0, 1, 2], [1, 2], [3, 4], [3, 4, 5], [3, 4, 5]]
    assert torch.equal(pieces.positives, retrieval.padded(images))
    assert torch.equal(pieces.positives_of_image, retrieval.padded(texts))
    metrics, _ = retrieval.retrieval_both_ways(pieces)
    assert metrics["R@1-Mean"] == 100


# ------------------------------------------ the space ----------------------------------------
def test_health_by_hand():
    """Images and texts of unequal spread: each measure is of the side that its name says."""
    torch.manual_seed(0)
    image = torch.randn(7, 4)
    text = torch.randn(7, 4) + torch.tensor([3.0, 0, 0, 0])
    a = F.normalize(image.double(), dim=1).numpy()
    b = F.normalize(text.double(), dim=1).numpy()
    sim = a @ b.T
    positives = sim.diagonal()
    negatives = sim[~np.eye(7, dtype=bool)]
    losses = []
    for axis in (0, 1):
        losses.append(logsumexp(sim / 0.07, axis) - positives / 0.07)
    gaussian = np.exp(-2 * pdist(a) ** 2)
    expected = {
        "std_image": 2 * a.std(0, ddof=1).mean(),
        "std_text": 2 * b.std(0, ddof=1).mean(),
        "uniformity": np.log(gaussian.mean()),
        "info_nce": np.mean(losses),
        "alignment": np.mean(2 - 2 * positives),
        "neg_cos": negatives.mean(),
        "pos_cos": positives.mean(),
        "pos_std": positives.std(),  # TeMo, App. G
        "gap": np.linalg.norm(a.mean(0) - b.mean(0)),
    }
    assert common.embedding_health(image, text) == pytest.approx(expected, rel=1e-3)


def test_no_image_of_a_group_is_a_negative_of_another():
    """One image of each class whose name is the caption, with its first caption."""
    torch.manual_seed(3)
    image, text = torch.randn(2, 20, 5)
    rows = np.arange(20)
    data = SimpleNamespace(has_captions=False, labels=rows // 4)
    captions = torch.stack([text, -text], 1).flatten(0, 1)
    pieces = EvaluationPieces(data, rows, image, captions, owner=rows.repeat(2))
    metrics, chance = retrieval.gap_and_health(pieces)
    expected = common.embedding_health(image[::4], text[::4])
    assert metrics["embeddings"].items() <= expected.items()
    assert chance["modality_gap"] == (1 / 20 + 1 / 40) ** 0.5
    assert chance["embeddings"] == {"info_nce": math.log(5)}


# ------------------------------------------- classes -----------------------------------------
@pytest.mark.parametrize("k", [1, 10])
def test_knn_against_scikit_learn(k):
    """In both the smallest of classes with equally many votes wins."""
    torch.manual_seed(0)
    train = unit(200, 16)
    test = unit(80, 16, seed=1)
    labels = torch.randint(5, (200,))
    test_labels = torch.randint(5, (80,))
    classifier = KNeighborsClassifier(k).fit(train, labels)
    top1 = classifier.score(test, test_labels)
    mean = balanced_accuracy_score(test_labels, classifier.predict(test))
    accuracy = common.knn_accuracy(3 * train, labels, test, test_labels, k=k, chunk=17)
    assert accuracy["top1"] == pytest.approx(100 * top1)
    assert accuracy["mean_per_class"] == pytest.approx(100 * mean)


@pytest.mark.parametrize("name, top1, mean", [
    ("knn@1", 73, 45),
    ("knn@10", 90, 45),
    ("all", 90, 100 / 3),
    ("few-shot", 100 / 3, 100 / 3),
])
def test_chance_is_what_noise_gets(name, top1, mean):
    """Of ten neighbours and of a probe on all: the most frequent class; of one: a random image.
    The test images are of classes 0 and 1 alone."""
    tenths = np.arange(2000) % 10
    labels = np.array([1, 2, 0, 0, 0, 0, 0, 0, 0, 0])[tenths]
    test_labels = (tenths == 0).astype(int)
    torch.manual_seed(0)
    train, test = torch.randn(2, 2000, 8).double()
    metrics, chance, _ = by_class.class_metrics(
        ["knn", "probe"], (train, train, labels), (test, test, test_labels))
    assert chance[name] == pytest.approx({"top1": top1, "mean_per_class": mean})
    assert metrics[name]["top1"] == pytest.approx(top1, abs=5)
    assert metrics["few-shot"]["shots"] == 200


def test_linear_probe_is_linear_svc_on_five_images_of_each_class():
    torch.manual_seed(0)
    train = unit(120, 10, seed=2)
    test = unit(600, 10, seed=3)
    labels = torch.randint(4, (120,))
    test_labels = torch.randint(4, (600,))
    order = np.random.RandomState(1).permutation(120)
    rows = []
    for c in range(4):
        of_class = order[labels[order] == c]
        rows.extend(of_class[:5])
    classifier = LinearSVC(random_state=42).fit(train[rows], labels[rows])
    expected = 100 * classifier.score(test, test_labels)
    accuracy = common.linear_probe(
        3 * train, labels, 2 * test, test_labels, few_shot=5, seed=1)
    assert accuracy["top1"] == pytest.approx(expected)


def test_zero_shot_accuracy_by_hand():
    """The right class is the first, second, fourth and last of five."""
    scores = torch.tensor([
        [9.0, 1, 2, 3, 4],
        [8.0, 9, 1, 1, 1],
        [5.0, 9, 8, 7, 1],
        [1.0, 9, 8, 7, 6]])
    labels = torch.zeros(4, dtype=torch.long)
    accuracy = common.zero_shot_accuracy(scores, labels, torch.eye(5))
    assert accuracy == {"top1": 25, "top3": 50, "top5": 100}


def test_images_are_padded_moved_and_flipped():
    """By up to four pixels each way, then mirrored: one bright pixel says where to."""
    pixels = torch.zeros(600, 1, 16, 20, dtype=torch.uint8)
    pixels[:, :, 6, 7] = 255
    captions = [["a"]] * 600
    keys = [str(i) for i in range(600)]
    table = common.make_table(captions, keys)
    data = common.Data("own", "train", table, pixels=pixels)
    moved = by_class.padded_and_flipped(data, 3).pixels
    _, _, rows, columns = moved.nonzero().T
    draws = common.uniforms(3, 0, np.arange(600), 3, stream=9)
    top, left, _ = np.floor(9 * draws).T
    row = 10 - top
    column = 11 - left
    mirrored = 19 - column
    is_mirrored = draws[:, 2] < 0.5
    assert np.array_equal(rows, row)
    assert np.array_equal(columns, np.where(is_mirrored, mirrored, column))


@pytest.mark.parametrize("prompts", [(), ("a {c}, worn.", "one {c}.")])
def test_zero_shot_by_prompts_which_are_not_cleaned_and_by_names(prompts, monkeypatch):
    """The mean of normalised prompts, the set's own if it has some, and the class names alone."""

    @functools.cache
    def embedding(text):
        return torch.randn(4)

    def encode(model, tokenizer, texts, device):
        assert not tokenizer.clean  # the CC3M trainer cleans captions alone
        return torch.stack([embedding(text) for text in texts])

    monkeypatch.setattr(by_class, "encode_texts", encode)
    tokenizer = Tokenizer(train_wordpiece(["a t-shirt."] * 9), 8, clean=True)
    data = SimpleNamespace(label_names=["t-shirt", "pear_tree", "zebra "], prompts=prompts)
    image = torch.randn(60, 4)
    labels = torch.arange(60) % 3
    metrics, chance, num_cut = by_class.zero_shot(
        None, tokenizer, image, labels.numpy(), data, device=CPU)
    for prefix, formats in (("", prompts or ["a photo of a {c}."]), ("names_", ["{c}"])):
        classes = []
        for name in ("t-shirt", "pear tree", "zebra"):
            parts = [embedding(text.replace("{c}", name)) for text in formats]
            classes.append(F.normalize(torch.stack(parts)).mean(0))
        expected = common.zero_shot_accuracy(image, labels, torch.stack(classes))
        assert metrics[f"{prefix}top1"] == expected["top1"]
        assert chance[f"{prefix}top1"] == pytest.approx(100 / 3)
    assert num_cut > 0
