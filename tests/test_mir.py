"""Multi-instance retrieval: the metrics against plain loops, relevancies, and the sets that have them."""

import common

import numpy as np
import pytest
import torch


def loop(sim, rel):
    """{mAP, mAP_binary, nDCG, no_match, unrelated} of the rows as queries, in plain Python."""
    ap, binary, ndcg = [], [], []
    for s, r in zip(np.asarray(sim, float).tolist(), np.asarray(rel, float).tolist()):
        ranked = [r[j] for j in sorted(range(len(s)), key=lambda j: (-s[j], r[j]))]  # ties: least relevant first
        ones, above = sum(x == 1 for x in ranked), sum(x > 0 for x in ranked)
        if ones:
            at = [k for k, x in enumerate(ranked) if x == 1]
            ap.append(sum(sum(ranked[:k + 1]) / (k + 1) for k in at) / ones)
            binary.append(sum(sum(x == 1 for x in ranked[:k + 1]) / (k + 1) for k in at) / ones)
        if above:
            gain = lambda order: sum(x / np.log2(k + 2) for k, x in enumerate(order[:above]))
            ndcg.append(gain(ranked) / gain(sorted(ranked, reverse=True)))
    return {"mAP": 100 * np.mean(ap), "mAP_binary": 100 * np.mean(binary), "nDCG": 100 * np.mean(ndcg),
            "no_match": len(sim) - len(ap), "unrelated": len(sim) - len(ndcg)}


def soft_relevancy(rows, columns, seed=0):
    """(rows, columns) of 0, 1/4, 1/2 and 1, with a few queries that have no match, or nothing, either way."""
    rng = np.random.default_rng(seed)
    rel = rng.choice([0, 0, 0.25, 0.5, 1], size=(rows, columns), p=[0.3, 0.3, 0.15, 0.15, 0.1])
    rel[3], rel[4, rel[4] == 1], rel[:, 2] = 0, 0.5, 0
    return rel


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [1, 7, 1024])
def test_against_a_plain_loop(kind, chunk):
    rel = soft_relevancy(31, 23)
    sim = torch.from_numpy(np.random.default_rng(1).normal(size=rel.shape).round(1)).to(kind)  # rounded: many ties
    got = common.mir_metrics(sim, torch.from_numpy(rel).to(kind), chunk=chunk)
    for way, s, r in (("rows", sim, rel), ("columns", sim.T, rel.T)):
        want = loop(s, r)
        assert want["no_match"] > want["unrelated"] > 0
        assert {k: got[way][k] for k in want} == pytest.approx(want, abs=1e-9)
        assert got[way]["queries"] == len(s)
    for k in ("mAP", "nDCG", "mAP_binary"):
        assert got[k] == pytest.approx((got["rows"][k] + got["columns"][k]) / 2)


def test_the_soft_precision_of_the_epic_code():
    got = common.mir_metrics(torch.tensor([[0.1, 0.9]]), np.array([[1, 0.5]]))["rows"]
    assert got["mAP"] == pytest.approx(75) and got["mAP_binary"] == pytest.approx(50)
    got = common.mir_metrics(torch.tensor([[0.1, 0.9]]), np.array([[1, 0.0]]))["rows"]
    assert got["mAP"] == pytest.approx(50)


def test_nothing_relevant_is_counted_and_nothing_at_all_raises():
    sim = torch.eye(3)
    got = common.mir_metrics(sim, torch.tensor([[1, 0, 0], [0, 0.5, 0], [0, 0, 0]]))["rows"]
    assert (got["mAP"], got["nDCG"], got["no_match"], got["unrelated"]) == (100, 100, 2, 1)
    with pytest.raises(ValueError, match="none of 3 queries has an item of relevancy 1"):
        common.mir_metrics(sim, torch.eye(3) / 2)


def test_a_collapsed_model_gains_nothing_from_ties():
    rel = torch.eye(50)
    got = common.mir_metrics(torch.zeros(50, 50), rel)
    assert got["mAP"] == pytest.approx(2) and got["nDCG"] == 0  # the one item stands last


@pytest.mark.parametrize("bad,words", [
    (dict(sim=torch.full((2, 2), float("nan"))), "non-finite"),
    (dict(relevancy=torch.full((2, 2), float("nan"))), "between 0 and 1"),
    (dict(relevancy=torch.full((2, 2), 1.5)), "between 0 and 1"),
    (dict(relevancy=torch.eye(3)), "differ in shape")])
def test_what_cannot_be_scored_raises(bad, words):
    with pytest.raises(ValueError, match=words):
        common.mir_metrics(**({"sim": torch.eye(2), "relevancy": torch.eye(2)} | bad))


def test_chance_is_what_a_random_order_gets():
    rel = soft_relevancy(12, 9, seed=2)
    chance, rng = common.mir_chance(rel), np.random.default_rng(0)
    runs = [common.mir_metrics(torch.from_numpy(rng.normal(size=rel.shape)), rel) for _ in range(600)]
    for k in ("mAP", "nDCG", "mAP_binary"):
        assert np.mean([r[k] for r in runs]) == pytest.approx(chance[k], abs=0.7), k
        assert np.mean([r["columns"][k] for r in runs]) == pytest.approx(chance["columns"][k], abs=1), k


def test_recalls_of_frequent_and_rare_queries():
    ranks = np.array([1, 1, 1, 4, 20, 1, 60, 60, 60])
    frequency = np.array([9, 9, 9, 5, 5, 5, 1, 2, 1])
    got = common.recall_by_frequency(ranks, frequency)
    assert [got[k]["R@1"] for k in ("head", "mid", "tail")] == pytest.approx([100, 100 / 3, 0])
    assert got["mid"]["R@5"] == pytest.approx(200 / 3) and got["tail"]["MdR"] == 60
    assert [(g["queries"], g["from"], g["to"]) for g in got.values()] == [(3, 9, 9), (3, 5, 5), (3, 1, 2)]
    order = np.random.default_rng(0).permutation(9)
    assert common.recall_by_frequency(ranks[order], frequency[order]) == got  # not a matter of the order
    assert common.recall_by_frequency(ranks, np.full(9, 4)) == {}
    uneven = common.recall_by_frequency(ranks, np.array([9] * 8 + [1]))  # one frequency is never split
    assert {k: v["queries"] for k, v in uneven.items()} == {"mid": 8, "tail": 1}
    with pytest.raises(ValueError, match="must be"):
        common.recall_by_frequency(ranks, frequency[:-1])


def test_ranks_themselves():
    generator = torch.Generator().manual_seed(0)
    query, gallery = torch.randn(40, 8, generator=generator), torch.randn(15, 8, generator=generator)
    positives = torch.arange(40)[:, None] % 15
    ranks = common.retrieval_metrics(query, gallery, positives, ranks=True)
    sim = common.normalize(query) @ common.normalize(gallery).T
    own = sim.gather(1, positives)
    assert ranks.tolist() == (sim >= own).sum(1).tolist()
    assert common.retrieval_metrics(query, gallery, positives)["MnR"] == pytest.approx(ranks.mean())
