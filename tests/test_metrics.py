"""Metrics against hand-computed cases: ties, several captions, bias, groups, chance."""

import math
import types

import common
from contrastive import evaluation

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import KNeighborsClassifier


def brute_ranks(query, gallery, positives, bias=None):
    """Rank of the best positive, by sorting in Python; every tie stands before it."""
    sim = (F.normalize(query, dim=1) @ F.normalize(gallery, dim=1).T + (0 if bias is None else bias)).tolist()
    out = []
    for row, own in zip(sim, positives):
        best = max(row[p] for p in own)
        out.append(1 + sum(s >= best for j, s in enumerate(row) if j not in own))
    return out


def table(rows):
    width = max(map(len, rows))
    return torch.tensor([r + [-1] * (width - len(r)) for r in rows])


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_ranks_against_brute_force(chunk):
    generator = torch.Generator().manual_seed(0)
    query, gallery = torch.randn(40, 8, generator=generator), torch.randn(15, 8, generator=generator)
    own = [sorted(set(torch.randint(0, 15, (1 + i % 4,), generator=generator).tolist())) for i in range(40)]
    for bias in (None, torch.randn(15, generator=generator)):
        ranks = np.array(brute_ranks(query, gallery, own, bias))
        assert (common.retrieval_metrics(query, gallery, table(own), bias=bias, chunk=chunk, ranks=True) == ranks).all()
        got = common.retrieval_metrics(query, gallery, table(own), bias=bias, chunk=chunk)
        for k in (1, 5, 10, 50):
            assert got[f"R@{k}"] == pytest.approx(100 * (ranks <= k).mean())
        assert got["MdR"] == np.median(ranks) and got["MnR"] == pytest.approx(ranks.mean())


def test_a_collapsed_model_is_last_and_identical_positives_are_no_ties():
    same, eye = torch.ones(100, 4), torch.eye(6)
    assert common.retrieval_metrics(same, same, torch.arange(100)[:, None], ranks=True).tolist() == [100] * 100
    assert common.retrieval_metrics(eye, eye, torch.arange(6)[:, None])["R@1"] == 100
    twins = torch.cat([eye[:1], eye[:1], eye[2:]])  # items 0 and 1 are one drawing: both positive, no tie against it
    assert common.retrieval_metrics(twins, twins, table([[0, 1], [0, 1], [2], [3], [4], [5]]))["R@1"] == 100


def test_groups_take_the_best_caption():
    video = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    captions = torch.tensor([[1.0, 0.1], [-1.0, 0.0], [0.6, 0.8], [0.0, -1.0]])  # two captions of each video
    groups, positives = torch.tensor([0, 0, 1, 1]), torch.tensor([[0], [1]])
    got = common.retrieval_metrics(video, captions, positives, groups=groups)
    assert got["R@1"] == 100
    bias = torch.tensor([0.0, 3.0, 0.0, 0.0])
    pushed = common.retrieval_metrics(video, captions, positives, groups=groups, bias=bias)
    assert pushed["R@1"] == 50  # the bias comes before the maximum: group 0 wins both


@pytest.mark.parametrize("name", ["query", "gallery", "bias"])
def test_non_finite_raises(name):
    inputs = {"query": torch.eye(3), "gallery": torch.eye(3), "bias": torch.zeros(3)}
    inputs[name] = inputs[name].clone()
    inputs[name].view(-1)[0] = float("nan")
    with pytest.raises(ValueError, match=name):
        common.retrieval_metrics(inputs["query"], inputs["gallery"], torch.arange(3)[:, None], bias=inputs["bias"])
    with pytest.raises(ValueError, match="no positive"):
        common.retrieval_metrics(torch.eye(2), torch.eye(2), torch.tensor([[0], [-1]]))


def test_chance_is_what_random_embeddings_get():
    rows = [[i] if i % 2 else [i, (i + 1) % 60, (i + 2) % 60] for i in range(60)]
    chance = evaluation.metrics.retrieval_chance(table(rows), 60)
    generator = torch.Generator().manual_seed(0)
    runs = []
    for _ in range(300):
        query, gallery = (torch.randn(60, 16, generator=generator) for _ in range(2))
        runs.append(common.retrieval_metrics(query, gallery, table(rows)))
    for key, tolerance in (("R@1", 0.6), ("R@5", 1.2), ("R@10", 1.5), ("R@50", 1.0), ("MnR", 0.7), ("MdR", 1.5)):
        assert np.mean([r[key] for r in runs]) == pytest.approx(chance[key], abs=tolerance), key
    assert evaluation.metrics.retrieval_chance(torch.arange(20)[:, None], 20)["R@10"] == pytest.approx(50)


@pytest.mark.parametrize("k", [1, 10])
def test_knn_against_scikit_learn(k):
    rng = np.random.default_rng(0)
    train, test = rng.normal(size=(200, 16)), rng.normal(size=(80, 16))
    labels, truth = rng.integers(0, 5, 200), rng.integers(0, 5, 80)
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
    predicted = KNeighborsClassifier(k).fit(unit(train), labels).predict(unit(test))  # ties: smallest class, as ours
    got = common.knn_accuracy(*map(torch.from_numpy, (train, labels, test, truth)), k=k, chunk=17)
    assert got["top1"] == pytest.approx(100 * (predicted == truth).mean())
    by_class = [(predicted == truth)[truth == c].mean() for c in range(5)]
    assert got["mean_per_class"] == pytest.approx(100 * np.mean(by_class))


def test_knn_ties_and_errors():
    train = torch.tensor([[1.0, 0.0], [0.99, 0.1]])
    tied = common.knn_accuracy(train, torch.tensor([3, 1]), torch.tensor([[1.0, 0.05]]), torch.tensor([1]), k=2)
    assert tied["top1"] == 100  # one vote each: the smaller class
    with pytest.raises(ValueError, match="k = 3"):
        common.knn_accuracy(train, torch.tensor([0, 1]), train, torch.tensor([0, 1]), k=3)
    with pytest.raises(ValueError, match="non-finite"):
        common.knn_accuracy(train * float("nan"), torch.tensor([0, 1]), train, torch.tensor([0, 1]))


def test_dual_softmax_against_loops():
    """Each cosine times its softmax over all queries; with groups of two before their maximum; in blocks as at once."""
    torch.manual_seed(0)
    query, gallery = F.normalize(torch.randn(7, 5), dim=1), F.normalize(torch.randn(6, 5), dim=1)
    gamma, positives = 0.1, torch.arange(7)[:, None] % 6
    sim = query.double() @ gallery.double().T                              # (7, 6)
    score = torch.stack([sim[:, j] * (sim[:, j] / gamma).exp() / (sim[:, j] / gamma).exp().sum() for j in range(6)], 1)
    ranks = [1 + sum(bool(s >= score[i, i % 6]) for j, s in enumerate(score[i]) if j != i % 6) for i in range(7)]
    for chunk in (2, 100):
        found = common.retrieval_metrics(query, gallery, positives, chunk=chunk, ranks=True, dsl=gamma)
        assert found.tolist() == ranks
    assert ranks != common.retrieval_metrics(query, gallery, positives, ranks=True).tolist()
    best = torch.stack([score[:, :2].amax(1), score[:, 2:4].amax(1), score[:, 4:].amax(1)], 1)               # (7, 3)
    own = (positives // 2)                                                 # (7, 1)
    expected = [1 + sum(bool(s >= row[k]) for j, s in enumerate(row) if j != k) for row, k in zip(best, own[:, 0])]
    groups = torch.arange(6) // 2
    assert common.retrieval_metrics(query, gallery, own, groups=groups, ranks=True, dsl=gamma).tolist() == expected
    sharp = common.retrieval_metrics(query, gallery, positives, ranks=True, dsl=0.005)
    assert sharp.max() <= 6                                                # no overflow, and few ties by underflow


def test_r_mean_is_the_mean_of_six_recalls():
    """R@1, R@5 and R@10 of both directions; so is its chance."""
    torch.manual_seed(0)
    n = 60
    image, own = torch.randn(n, 8), torch.arange(n)[:, None]
    pieces = {"image": image, "text": image + torch.randn(n, 8), "owner": np.arange(n), "positives": own,
              "positives_of_image": own, "data": types.SimpleNamespace(grouped=False)}
    for found in evaluation.retrieval.retrieval_both_ways(pieces):
        six = [found[way][f"R@{k}"] for way in ("text_to_image", "image_to_text") for k in (1, 5, 10)]
        assert found["R-Mean"] == pytest.approx(np.mean(six)) and max(six) < found["text_to_image"]["R@50"]
        assert found["R@1-Mean"] == pytest.approx((six[0] + six[3]) / 2)   # "Avg." of MM-TS's Table 1


class Perfect(torch.nn.Module):
    """The embedding of a text is its letter; its own tokenizer."""

    def tokenizer(self, texts):
        return {"letters": F.one_hot(torch.tensor([ord(t) - ord("a") for t in texts]), 8).float()}

    def forward(self, tokens):
        return None, tokens["letters"]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("same_text", ["positive", "wrong"])
def test_a_perfect_model_and_a_text_that_two_items_have(same_text, grouped, capsys):
    """Items 1 and 6 of eight say 'b': from an item either text is right, or its twin ties with its own and is wrong;
    from the text neither item can be told, whatever the flag."""
    captions, model = [[c] for c in "abcdefbg"], Perfect()
    table = common.make_table(captions, [*map(str, range(8))])
    data = common.Data("mine", "test", table, same_text=same_text, grouped=grouped)
    image = model.tokenizer([c for [c] in captions])["letters"]
    tokenizer = type("Tokens", (), {"__call__": lambda self, texts: model.tokenizer(texts), "cut": lambda *_: 0})()
    pieces = evaluation.retrieval.retrieval_pieces(model, tokenizer, data, np.arange(8), image, torch.device("cpu"))
    metrics, chance = evaluation.retrieval.retrieval_both_ways(pieces)
    assert pieces["repeated"] == 2 and metrics["text_to_image"]["R@1"] == 75
    right = same_text == "positive"
    assert metrics["image_to_text"]["R@1"] == (100 if right else 75)
    assert chance["image_to_text"]["R@1"] == pytest.approx(100 * (6 + 2 * (2 if right else 1)) / 64)
    metrics |= {"captions": 8, "captions_repeated": 2, "same_text": same_text}
    said = evaluation.retrieval.table("mine", metrics, {})
    assert f"2 captions are word for word those of another image too: {same_text} in image -> text; nothing" in said


def test_chance_of_a_random_neighbour():
    """Three training images of class 0 and one of class 1: each class is guessed as often as it is seen."""
    def chance(labels):
        return evaluation.metrics.knn_chance(np.array([0, 0, 0, 1]), np.array(labels))
    assert chance([0, 1]) == {"top1": 50, "mean_per_class": 50}
    assert chance([0, 0, 0, 1]) == {"top1": 62.5, "mean_per_class": 50}
    assert chance([0, 0]) == {"top1": 75, "mean_per_class": 75}


def test_health_against_loops():
    """Images and texts of unequal spread: each measure is of the side, and with the factor, that its name says."""
    torch.manual_seed(0)
    image, text = torch.randn(7, 4), torch.randn(7, 4) + torch.tensor([3.0, 0, 0, 0])
    found = common.embedding_health(image, text)
    a, b = (F.normalize(x.double(), dim=1).numpy() for x in (image, text))
    for name, side in (("std_image", a), ("std_text", b)):
        assert found[name] == pytest.approx(2 * np.mean([np.std(side[:, d], ddof=1) for d in range(4)]), rel=1e-4)
    far = [math.exp(-2 * ((a[i] - a[j]) ** 2).sum()) for i in range(7) for j in range(i)]
    assert found["uniformity"] == pytest.approx(math.log(np.mean(far)), rel=1e-4)
    assert found["alignment"] == pytest.approx(np.mean([((x - y) ** 2).sum() for x, y in zip(a, b)]), rel=1e-4)
    others = [a[i] @ b[j] for i in range(7) for j in range(7) if i != j]
    assert found["neg_cos"] == pytest.approx(np.mean(others), rel=1e-3)
    assert found["pos_cos"] == pytest.approx(np.mean([x @ y for x, y in zip(a, b)]), rel=1e-3)
    assert found["pos_std"] == pytest.approx(np.std([x @ y for x, y in zip(a, b)]), rel=1e-3)   # TeMo, App. G
    assert found["gap"] == pytest.approx(np.linalg.norm(a.mean(0) - b.mean(0)), rel=1e-4)
