"""Metrics against computations by hand: ranks, ties, bias, groups, neighbours, probes, classes,
health; chance."""

import collections
import dataclasses
import itertools
import math
import types

import common
from contrastive import core, encoders, evaluation
from contrastive.core.words import counted
from contrastive.evaluation.pieces import EvaluationPieces

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import LinearSVC

from helpers import unit

WAYS = ("text_to_image", "image_to_text")


def table(rows):
    width = max(map(len, rows))
    return torch.tensor([r + [-1] * (width - len(r)) for r in rows])


def brute_ranks(sim, own):
    """Rank of the best positive of each row, by a loop; every tie stands before it."""
    best = [max(row[k] for k in of) for row, of in zip(sim.tolist(), own)]
    return [
        1 + sum(s >= top for j, s in enumerate(row) if j not in of)
        for row, of, top in zip(sim.tolist(), own, best)
    ]


# ---------------------------------------- retrieval ----------------------------------------------
@pytest.mark.parametrize("chunk", [7, 4096])
def test_ranks_against_brute_force(chunk):
    query = unit(40, 8).float()
    gallery = unit(15, 8, seed=1).float()
    generator = torch.Generator().manual_seed(0)
    own = [
        sorted(set(torch.randint(0, 15, (1 + i % 4,), generator=generator).tolist()))
        for i in range(40)
    ]
    for bias in (None, torch.randn(15, generator=generator)):
        ranks = np.array(brute_ranks(query @ gallery.T + (0 if bias is None else bias), own))
        inputs = 3 * query, 2 * gallery, table(own), bias  # embeddings of any length
        assert (core.metrics.retrieval_ranks(*inputs, chunk=chunk) == ranks).all()
        recalls = {f"R@{k}": 100 * (ranks <= k).mean() for k in (1, 5, 10, 50)}
        assert common.retrieval_metrics(*inputs, chunk=chunk) == pytest.approx(
            recalls | {"MdR": np.median(ranks), "MnR": ranks.mean()}
        )


def test_a_collapsed_model_is_last_and_identical_positives_are_no_ties():
    same, eye = torch.ones(100, 4), torch.eye(6)
    assert (
        core.metrics.retrieval_ranks(same, same, torch.arange(100)[:, None]).tolist()
        == [100] * 100
    )
    # items 0 and 1 are one drawing: both positive, no tie against it
    twins = torch.cat([eye[:1], eye[:1], eye[2:]])
    assert (
        common.retrieval_metrics(twins, twins, table([[0, 1], [0, 1], [2], [3], [4], [5]]))["R@1"]
        == 100
    )


@pytest.mark.parametrize("name", ["query", "gallery", "bias", "no positive"])
def test_broken_input_raises(name):
    inputs = {"query": torch.eye(3), "gallery": torch.eye(3), "bias": torch.zeros(3)}
    positives = torch.tensor([[0], [1], [-1 if name == "no positive" else 2]])
    if name in inputs:
        inputs[name].view(-1)[0] = math.nan
    with pytest.raises(ValueError, match=name):
        common.retrieval_metrics(positives=positives, **inputs)


def test_both_directions_with_biases_and_groups():
    """By hand, four clips of three captions each; a grouped set ranks clips by their best
    caption, after the bias."""
    image, text = unit(4, 8).float(), unit(12, 8, seed=1).float()
    of_image, of_text = torch.randn(16, generator=torch.manual_seed(0)).split([4, 12])
    owner, own = np.arange(12) // 3, torch.arange(12).view(4, 3)
    sim, seen = image @ text.T + of_text, []  # (4, 12)
    for grouped in (False, True):
        pieces = EvaluationPieces(
            image=image,
            text=text,
            owner=owner,
            positives=torch.arange(12)[:, None] // 3,
            positives_of_image=own,
            data=types.SimpleNamespace(grouped=grouped),
        )
        found, chance = evaluation.retrieval.retrieval_both_ways(pieces, of_image, of_text)
        ranks = {
            "text_to_image": brute_ranks(text @ image.T + of_image, [[c] for c in owner]),
            "image_to_text": brute_ranks(sim.unflatten(1, (4, 3)).amax(2), [[k] for k in range(4)])
            if grouped
            else brute_ranks(sim, own.tolist()),
        }
        assert [found[way]["MnR"] for way in WAYS] == pytest.approx(
            [np.mean(ranks[way]) for way in WAYS]
        )
        assert [chance[way]["R@1"] for way in WAYS] == [25, 25]
        seen.append(ranks["image_to_text"])
        six = [100 * np.mean(np.array(ranks[way]) <= k) for way in WAYS for k in (1, 5, 10)]
        assert found["R-Mean"] == pytest.approx(np.mean(six))
        # "Avg." of MM-TS's Table 1
        assert found["R@1-Mean"] == pytest.approx((six[0] + six[3]) / 2)
    assert np.mean(seen[0]) != np.mean(seen[1])


def test_chance_is_what_random_embeddings_get():
    rows = table([[i] if i % 2 else [i, (i + 1) % 60, (i + 2) % 60] for i in range(60)])
    generator, chance = torch.Generator().manual_seed(0), core.metrics.retrieval_chance(rows, 60)
    pairs = [torch.randn(2, 60, 16, generator=generator) for _ in range(300)]
    runs = [common.retrieval_metrics(query, gallery, rows) for query, gallery in pairs]
    for key, tolerance in (
        ("R@1", 0.6),
        ("R@5", 1.2),
        ("R@10", 1.5),
        ("R@50", 1.0),
        ("MnR", 0.7),
        ("MdR", 1.5),
    ):
        assert np.mean([r[key] for r in runs]) == pytest.approx(chance[key], abs=tolerance), key


def test_dual_softmax_against_loops():
    """Each cosine times its softmax over all queries; with groups of two before their maximum;
    in blocks as at once."""
    query, gallery = unit(7, 5), unit(6, 5, seed=1)
    gamma, own, groups = 0.1, torch.arange(7)[:, None] % 6, torch.arange(6) // 2
    weight = (query @ gallery.T / gamma).exp()  # (7, 6)
    score = query @ gallery.T * weight / weight.sum(0)
    best = score.unflatten(1, (3, 2)).amax(2)  # (7, 3)
    for kept, place, more in ((score, own, {}), (best, own // 2, {"groups": groups})):
        plain = core.metrics.retrieval_ranks(query, gallery, place, **more)
        for chunk in (2, 100):
            found = core.metrics.retrieval_ranks(
                query, gallery, place, chunk=chunk, dsl=gamma, **more
            )
            assert found.tolist() == brute_ranks(kept, place.tolist()) != plain.tolist()
    sharp = core.metrics.retrieval_ranks(query, gallery, own, dsl=0.005)
    assert sharp.max() <= 6  # no overflow, and few ties by underflow


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("same_text", ["positive", "wrong"])
def test_a_perfect_model_and_a_text_that_two_items_have(same_text, grouped, monkeypatch):
    """Items 1 and 6 of eight say 'b': either the twin is right as well, in both directions, or it
    ties with the text's own item, and counts as wrong."""

    def letters(texts):
        return F.one_hot(torch.tensor([ord(t) - ord("a") for t in texts]), 8).float()

    monkeypatch.setattr(
        evaluation.retrieval, "encode_texts", lambda model, words, texts, *_: letters(texts)
    )
    captions = [*"abcdefbg"]
    words = types.SimpleNamespace(count_cut=lambda texts: 0)
    right = same_text == "positive"
    data = common.Data(
        "mine",
        "test",
        common.make_table([[c] for c in captions], [*map(str, range(8))]),
        same_text=same_text,
        grouped=grouped,
    )
    pieces = EvaluationPieces(data, np.arange(8), letters(captions))
    evaluation.retrieval.encode_captions(pieces, None, words, "cpu")
    metrics, chance = evaluation.retrieval.retrieval_both_ways(pieces)
    assert pieces.num_repeated == 2
    for direction in ("text_to_image", "image_to_text"):
        assert metrics[direction]["R@1"] == (100 if right else 75)
        expected = 100 * (6 + 2 * (2 if right else 1)) / 64
        assert chance[direction]["R@1"] == pytest.approx(expected)
    metrics |= {"captions": 8, f"repeated_captions_{same_text}": 2}
    said = evaluation.report.table("mine", metrics, {})
    assert f"8 captions, 2 repeated captions {same_text}; " in said
    assert ("nothing tells them apart" in said) == (not right)


def test_every_image_with_the_words_of_a_query_is_right_and_the_other_way_round(monkeypatch):
    """Image 0 has the captions x and y, image 1 y, image 2 z; rows 3 and 4 are one group of z, w.
    """
    monkeypatch.setattr(
        evaluation.retrieval, "encode_texts", lambda model, words, texts, *_: torch.eye(len(texts)))
    table = common.make_table(
        [["x", "y"], ["y"], ["z"], ["z"], ["w"]], [*map(str, range(5))], group=[0, 1, 2, 3, 3])
    pieces = EvaluationPieces(common.Data("mine", "test", table), np.arange(5), torch.eye(5, 6))
    words = types.SimpleNamespace(count_cut=lambda texts: 0)
    evaluation.retrieval.encode_captions(pieces, None, words, "cpu")

    def items(positives):
        return [[item for item in row if item >= 0] for row in positives.tolist()]

    assert pieces.texts == ["x", "y", "y", "z", "z", "w"] and pieces.num_repeated == 4
    assert items(pieces.positives) == [[0], [0, 1], [0, 1], [2, 3, 4], [2, 3, 4], [3, 4]]
    assert items(pieces.positives_of_image) == [
        [0, 1, 2], [1, 2], [3, 4], [3, 4, 5], [3, 4, 5]]


def test_images_with_the_same_pixels_are_counted():
    pixels = torch.arange(7)[:, None, None, None].expand(7, 3, 4, 4).to(torch.uint8).clone()
    pixels[5] = pixels[0]
    pixels[6] = pixels[0]
    pixels[4] = pixels[0]
    pixels[4, 0, 0, 0] += 1
    table = common.make_table([["a"]] * 7, [*map(str, range(7))])
    data = common.Data("mine", "test", table, pixels=pixels)
    view = common.EvalTransform(4, (0,) * 3, (1,) * 3)

    class Model(torch.nn.Module):
        def forward(self, x):
            return x.flatten(1), None, x.flatten(1)

    encoded = evaluation.embed.encode_images(Model(), data, view, torch.device("cpu"), batch=2)
    assert encoded.num_identical == 3


# ---------------------------------------- the space ----------------------------------------------
def test_health_against_loops():
    """Images and texts of unequal spread: each measure is of the side, and with the factor,
    that its name says."""
    torch.manual_seed(0)
    image, text = torch.randn(7, 4), torch.randn(7, 4) + torch.tensor([3.0, 0, 0, 0])
    a, b = (F.normalize(x.double(), dim=1).numpy() for x in (image, text))
    pairs = [x @ y for x, y in zip(a, b)]
    rows = [[math.exp(x @ y / 0.07) for y in b] for x in a]
    losses = [
        -math.log(one[i] / sum(one)) for way in (rows, zip(*rows)) for i, one in enumerate(way)
    ]
    far = [math.exp(-2 * ((a[i] - a[j]) ** 2).sum()) for i in range(7) for j in range(i)]
    expected = {
        name: 2 * np.mean([np.std(side[:, d], ddof=1) for d in range(4)])
        for name, side in (("std_image", a), ("std_text", b))
    }
    expected |= {
        "uniformity": math.log(np.mean(far)),
        "info_nce": np.mean(losses),
        "alignment": np.mean([((x - y) ** 2).sum() for x, y in zip(a, b)]),
        "neg_cos": np.mean([a[i] @ b[j] for i in range(7) for j in range(7) if i != j]),
        "pos_cos": np.mean(pairs),
        "pos_std": np.std(pairs),  # TeMo, App. G
        "gap": np.linalg.norm(a.mean(0) - b.mean(0)),
    }
    assert common.embedding_health(image, text) == pytest.approx(expected, rel=1e-3)


def test_no_image_is_its_own_negative():
    """gap: the health of the space by one caption of each image; one image has none."""
    image, text = torch.randn(6, 5, generator=torch.manual_seed(0)).split([3, 3])
    four_texts = text.repeat_interleave(4, 0)
    data = types.SimpleNamespace(has_captions=True, groups=np.arange(3))
    pieces = EvaluationPieces(
        data, np.arange(3), image=image, text=four_texts, owner=np.arange(3).repeat(4))
    metrics, chance = evaluation.retrieval.gap_and_health(pieces)
    expected = common.embedding_health(image, text)
    assert len(metrics["embeddings"]) > 4
    assert metrics["embeddings"].items() <= expected.items()
    assert chance["modality_gap"] == (1 / 3 + 1 / 12) ** 0.5
    assert chance["embeddings"] == {"info_nce": math.log(3)}
    one = EvaluationPieces(
        data, np.arange(1), image=image[:1], text=text[:2], owner=np.zeros(2, int))
    # a spread of one is nan, which is no JSON
    assert "embeddings" not in evaluation.retrieval.gap_and_health(one)[0]


def test_no_image_of_a_group_is_a_negative_of_another(monkeypatch):
    """One image of each class whose name is the caption; of many classes not the first ones."""
    image, text = torch.randn(40, 5, generator=torch.Generator().manual_seed(3)).split([20, 20])
    data = types.SimpleNamespace(has_captions=False, labels=np.arange(20) // 4)
    pieces = EvaluationPieces(data, np.arange(20), image=image, text=text, owner=np.arange(20))
    found = evaluation.retrieval.gap_and_health(pieces)[0]["embeddings"]
    assert found and found.items() <= common.embedding_health(image[::4], text[::4]).items()
    monkeypatch.setattr(evaluation.retrieval, "MAX_HEALTH", 3)
    some = evaluation.retrieval.gap_and_health(pieces)[0]["embeddings"]
    assert some == evaluation.retrieval.gap_and_health(pieces)[0]["embeddings"]
    of_sets = []
    for rows in itertools.combinations(range(0, 20, 4), 3):
        rows = list(rows)
        of_sets.append(some.items() <= common.embedding_health(image[rows], text[rows]).items())
    assert sum(of_sets) == 1 and not of_sets[0]


# ---------------------------------------- classes ------------------------------------------------
@pytest.mark.parametrize("k", [1, 10])
def test_knn_against_scikit_learn(k):
    rng = np.random.default_rng(0)
    train, test = rng.normal(size=(200, 16)), rng.normal(size=(80, 16))
    labels, truth = rng.integers(0, 5, 200), rng.integers(0, 5, 80)
    known, asked = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (train, test))
    # ties: smallest class, as ours
    predicted = KNeighborsClassifier(k).fit(known, labels).predict(asked)
    got = common.knn_accuracy(*map(torch.from_numpy, (train, labels, test, truth)), k=k, chunk=17)
    assert got["top1"] == pytest.approx(100 * (predicted == truth).mean())
    by_class = [(predicted == truth)[truth == c].mean() for c in range(5)]
    assert got["mean_per_class"] == pytest.approx(100 * np.mean(by_class))


def test_knn_ties_and_what_is_not_finite():
    train = torch.tensor([[1.0, 0.0], [0.99, 0.1]])
    tied = common.knn_accuracy(
        train, torch.tensor([3, 1]), torch.tensor([[1.0, 0.05]]), torch.tensor([1]), k=2
    )
    assert tied["top1"] == 100  # one vote each: the smaller class
    with pytest.raises(ValueError, match="non-finite"):
        common.knn_accuracy(train * math.nan, torch.tensor([0, 1]), train, torch.tensor([0, 1]))


@pytest.mark.parametrize(
    "truth, top1, mean", [([0, 1], 50, 50), ([0, 0, 0, 1], 62.5, 50), ([0, 0], 75, 75)]
)
def test_chance_of_a_random_neighbour(truth, top1, mean):
    """Three training images of class 0 and one of class 1: each class is guessed as often as it
    is seen."""
    rows = [(x := torch.eye(4)[: len(y)], x, np.array(y)) for y in ([0, 0, 0, 1], truth)]
    chance = evaluation.by_class.class_metrics(["knn"], *rows)[1]["knn@1"]
    assert chance == {"top1": top1, "mean_per_class": mean}


def test_chance_is_what_noise_gets():
    """Of ten neighbours and of a probe on all: the most frequent class; of one: a random image."""
    rng = np.random.default_rng(0)
    noise = [torch.from_numpy(rng.standard_normal((2000, 8))) for _ in range(2)]
    labels = np.arange(2000) % 10 == 0  # 90 % of class 0
    rows = [(x, x, labels.astype(int)) for x in noise]
    metrics, chance, _ = evaluation.by_class.class_metrics(["knn", "probe"], *rows)
    for name, top1 in (("knn@1", 82), ("knn@10", 90), ("all", 90), ("few-shot", 50)):
        assert chance[name] == pytest.approx({"top1": top1, "mean_per_class": 50})
        assert metrics[name]["top1"] == pytest.approx(top1, abs=5), name
    assert metrics["few-shot"]["shots"] == 200


def test_linear_probe_is_linear_svc():
    rng = np.random.default_rng(0)
    x, q = unit(120, 10, seed=2).numpy(), unit(600, 10, seed=3).numpy()
    y, truth = rng.permutation(np.repeat(np.arange(4), 30)), rng.integers(0, 4, 600)
    data, found = [torch.from_numpy(a) for a in (3 * x, y, 2 * q, truth)], []
    for seed, few in ((42, None), (42, 5), (1, 5)):
        order = np.random.RandomState(seed).permutation(120)
        rows = (
            np.concatenate([order[y[order] == c][:few] for c in range(4)])
            if few
            else np.arange(120)
        )
        expected = LinearSVC(random_state=42).fit(x[rows], y[rows]).predict(q)
        found.append(common.linear_probe(*data, few_shot=few, seed=seed)["top1"])
        assert found[-1] == pytest.approx(100 * (expected == truth).mean())
    assert len({*found}) == 3
    with pytest.raises(ValueError, match="smallest class has 30"):
        common.linear_probe(*data, few_shot=31)


def test_classes_on_a_long_tail():
    """Head, mid and tail by the limits that are given, else by thirds; the few are drawn by
    seed 42."""
    generator, sizes = torch.Generator().manual_seed(0), [30, 20, 10, 9, 8]
    known, features = (torch.randn(n, 6, generator=generator) for n in (sum(sizes), 50))
    known_labels = torch.arange(5).repeat_interleave(torch.tensor(sizes))
    labels = torch.arange(5).repeat(10)
    data = (known, known, known_labels.numpy()), (features, features, labels.numpy())
    of_class = common.knn_accuracy(known, known_labels, features, labels, per_class=True)[
        "per_class"
    ]
    for limits, parts in (([25, 9], ([0], [1, 2, 3], [4])), (None, ([0, 1], [2, 3], [4]))):
        metrics, chance, per_class = evaluation.by_class.class_metrics(
            ["knn"], *data, limits=limits
        )
        means = {
            k: np.mean([of_class[c] for c in part])
            for k, part in zip(("head", "mid", "tail"), parts)
        }
        assert means.items() <= metrics["knn@1"].items()
        assert metrics.keys() == chance.keys() == {"knn@1", "knn@10"}
        assert per_class == of_class
    few = common.linear_probe(known, known_labels, features, labels, 8)
    metrics, chance, _ = evaluation.by_class.class_metrics(["probe"], *data)
    assert few.items() <= metrics["few-shot"].items()
    assert chance["all"] == {"top1": 20, "mean_per_class": 20}


@pytest.mark.parametrize("number, text", [(1, "1 caption cut"), (2, "2 captions cut")])
def test_counted_captions(number, text):
    assert counted(number, "captions_cut") == text
    assert counted(number, "without_class") == f"{number} without class"


def test_images_are_padded_moved_and_flipped():
    """By up to four pixels down or up and right or left, then mirrored: one bright pixel says
    where to."""
    Images = dataclasses.make_dataclass(
        "Images", ["pixels"], namespace={"__len__": lambda self: len(self.pixels)}
    )
    pixels = torch.zeros(600, 3, 16, 20, dtype=torch.uint8)
    pixels[:, :, 6, 7] = 255
    moved = evaluation.by_class.padded_and_flipped(Images(pixels), 3).pixels
    assert moved.shape == pixels.shape and moved.count_nonzero() == 600 * 3
    u = common.uniforms(3, 0, np.arange(600), 3, stream=9)
    down, right = (4 - np.floor(9 * u[:, k]).astype(int) for k in (0, 1))
    place = moved[:, 0].flatten(1).argmax(1).numpy()
    assert {*down} == {*right} == {*range(-4, 5)} and (place // 20 == 6 + down).all()
    assert (place % 20 == np.where(u[:, 2] < 0.5, 19 - (7 + right), 7 + right)).all()


@pytest.mark.parametrize("prompts", [(), ("a {c}, worn.", "one {c}.")])
def test_zero_shot_by_prompts_which_are_not_cleaned_and_by_names(prompts, monkeypatch):
    """The mean of normalised prompts, the set's own if it has some, and the class names alone,
    by hand. The CC3M trainer cleans captions alone: a prompt keeps its full stop and its
    hyphens."""
    generator, cleaned = torch.Generator().manual_seed(0), []
    of_text = collections.defaultdict(lambda: torch.randn(4, generator=generator))
    monkeypatch.setattr(
        evaluation.by_class,
        "encode_texts",
        lambda model, words, texts, device: (
            cleaned.append(words.clean) or torch.stack([of_text[t] for t in texts])
        ),
    )
    words = encoders.texts.Tokenizer(
        encoders.texts.train_wordpiece(["a t-shirt."] * 9), 8, clean=True
    )
    data = types.SimpleNamespace(label_names=["t-shirt", "pear_tree", "zebra "], prompts=prompts)
    image, labels = torch.randn(60, 4, generator=generator), np.arange(60) % 3
    found, chance, num_cut = evaluation.by_class.zero_shot(
        None, words, image, labels, data, device="cpu")
    long = [text for text in of_text if len(words.tokenizer(text)["input_ids"]) > words.length]
    assert num_cut == len(long) > 0
    for reading, formats in (("top1", prompts or ["a photo of a {c}."]), ("names_top1", ["{c}"])):
        texts = [
            [f.replace("{c}", name) for f in formats] for name in ("t-shirt", "pear tree", "zebra")
        ]
        classes = [sum(F.normalize(of_text[t], dim=0) for t in of_class) for of_class in texts]
        near = (image @ F.normalize(torch.stack(classes), dim=1).T).argmax(1).numpy()
        assert found[reading] == pytest.approx(100 * (near == labels).mean())
        assert chance[reading] == pytest.approx(100 / 3)
    assert cleaned == [False, False]
