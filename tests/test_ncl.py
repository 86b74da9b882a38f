"""NCL: Sinkhorn biases and losses against loops in float64, the queue, test-time normalisation, leaks, resume, several
processes, eval.py, bad input."""

import json
import math
import time
from types import SimpleNamespace

import common
from contrastive import engine, evaluation, figures
from contrastive.data import HELD_OUT, held_out_place
from contrastive.data.batches import epoch_batches
from contrastive.engine.processes import UserError, flatten, read_json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import eval as eval_py
import helpers
import launch
import ncl
import temo
from helpers import (
    equal_files,
    fork,
    losses,
    panel,
    refused,
    rows,
    run_script,
    steps,
    tensors_of,
    unit,
    write_images,
    write_rows,
)

N, D = 12, 6
SHAPES = [(16, 16), (40, 17), (5, 60)]
DRAWS = True  # where a test asks for it, see `main`
BASE = ["--cpu"]
SMALL = [*BASE, "--clips", "64", "16", "16", "--batch-size", "16", "--max-steps", "4", "--log-every", "1"]
SMALL += ["--eval-every", "0"]
BOTH = ("text_to_image", "image_to_text")


def pairs(n=N, d=D, noise=0.7, hub=0.0, seed=0):
    """Texts and the videos near them, (n, d) float64 each.

    hub: how far the videos lean, each by another length, to where all texts lean.
    """
    text, other, way = unit(n, d, seed=seed), unit(n, d, seed=seed + 1), unit(1, d, seed=seed + 2)
    lean = hub * torch.rand(n, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return F.normalize(text + hub * way, dim=1), F.normalize(text + noise * other + 2 * lean * way, dim=1)


def simplex(n, seed):
    x = 0.2 + torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x / x.sum()


# ---------------------------------------------------- Sinkhorn -------------------------------------------------------
def log_sum_exp(values):
    top = max(values)
    return top + math.log(sum(math.exp(v - top) for v in values))


def loop_sinkhorn(sim, gamma, iterations, r=None, c=None):
    """Eqs. 7 to 11 over Python floats, rows first: u = log r - lse_j(S + w), w = log c - lse_i(S + u)."""
    m, n = sim.shape
    S = [[x / gamma for x in row] for row in sim.tolist()]
    log_r, log_c = ([math.log(x) for x in (p.tolist() if p is not None else [1 / k] * k)] for p, k in ((r, m), (c, n)))
    w = [0.0] * n
    for _ in range(iterations):
        u = [log_r[i] - log_sum_exp([S[i][j] + w[j] for j in range(n)]) for i in range(m)]
        w = [log_c[j] - log_sum_exp([S[i][j] + u[i] for i in range(m)]) for j in range(n)]
    return tuple(torch.tensor([gamma * (x - log_sum_exp(v)) for x in v], dtype=torch.float64) for v in (u, w))


@pytest.mark.parametrize("priors", [False, True], ids=["uniform", "priors"])
@pytest.mark.parametrize("gamma", [0.01, 0.05])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_biases_against_a_loop(shape, gamma, priors):
    m, n = shape
    sim = unit(m, 8, seed=1) @ unit(n, 8, seed=2).T
    shares = (simplex(m, 3), simplex(n, 4)) if priors else (None, None)
    for iterations in (1, 4, 300):
        expected = loop_sinkhorn(sim, gamma, iterations, *shares)
        for dtype, tolerance in ((torch.float32, 3e-3), (torch.float64, 1e-9)):
            got = ncl.sinkhorn_biases(sim.to(dtype), gamma, iterations, *shares)
            for bias, reference, size in zip(got, expected, shape):
                assert bias.shape == (size,) and bias.dtype == dtype
                assert ((bias.double() - reference) / gamma).abs().max() < tolerance
                # Eqs. 10 and 11: gamma log of a simplex
                assert (bias.double() / gamma).exp().sum().item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("iterations", [4, 300])
def test_biases_are_finite_where_exp_overflows(iterations):
    assert math.isinf(torch.tensor(1 / 0.01).exp().item())  # a plain exp in float32
    column = torch.cat([torch.ones(9, 1), -torch.ones(9, 8)], 1)
    for sim in (torch.ones(16, 16), 2 * torch.eye(16) - 1, -torch.ones(4, 9), column):
        a, b = ncl.sinkhorn_biases(sim, 0.01, iterations)
        assert torch.isfinite(a).all() and torch.isfinite(b).all()
    e = torch.ones(16, 8, requires_grad=True)
    loss = ncl.ncl_loss(e, torch.ones(16, 8), 0.01, iterations, detach=False)
    loss.backward()
    assert torch.isfinite(e.grad).all() and loss.item() == pytest.approx(math.log(16))  # a random guess


# ---------------------------------------------------- the losses -----------------------------------------------------
def loop_ncl(text, video, gamma, iterations):
    """Eqs. 4 and 12 with both biases in both directions, over Python floats; iterations 0: CLIP's loss."""
    n, sim = len(text), [[sum(x * y for x, y in zip(t, v)) for v in video.tolist()] for t in text.tolist()]
    a, b = [0.0] * n, [0.0] * n
    if iterations:
        matrix = torch.tensor(sim, dtype=torch.float64)
        a, b = (x.tolist() for x in loop_sinkhorn(matrix, gamma, iterations))
    s = [[(a[i] + b[j] + sim[i][j]) / gamma for j in range(n)] for i in range(n)]
    t2v = sum(log_sum_exp(s[i]) - s[i][i] for i in range(n)) / n
    v2t = sum(log_sum_exp([s[i][j] for i in range(n)]) - s[j][j] for j in range(n)) / n
    return t2v, v2t


def test_biases_of_16_bit_cosines_are_float32():
    sim = (unit(8, 4, seed=1) @ unit(8, 4, seed=2).T).bfloat16()
    for a, b in zip(ncl.sinkhorn_biases(sim, 0.05), ncl.sinkhorn_biases(sim.float(), 0.05)):
        assert a.dtype == torch.float32 and torch.equal(a, b)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_priors_are_met(shape):
    m, n = shape
    sim, r, c = unit(m, 8, seed=1) @ unit(n, 8, seed=2).T, simplex(m, 3), simplex(n, 4)
    def shares(iterations, gamma):
        a, b = ncl.sinkhorn_biases(sim, gamma, iterations, r, c)
        P = ((a[:, None] + b + sim) / gamma).exp()
        return P.sum(1) / P.sum(), P.sum(0) / P.sum()
    rows, columns = shares(1000, 0.05)
    assert torch.allclose(rows, r, rtol=1e-4, atol=0) and torch.allclose(columns, c, rtol=1e-4, atol=0)
    rows, columns = shares(4, 0.01)
    # the columns are last: exact after any round
    assert torch.allclose(columns, c, rtol=1e-9, atol=0) and not torch.allclose(rows, r, rtol=1e-2, atol=0)


def test_every_item_collects_one_query_at_convergence():
    """Eq. 13 and Appendix A: P_t2v(v_j | t_i) sums to 1 over the texts; and the other way round."""
    text, video = pairs(32, 16, noise=1.2, hub=0.5)
    sim, gamma = text @ video.T, 0.05
    for s, side in ((sim, 1), (sim.T, 0)):
        error = {}
        for k in (0, 4, 20, 500):
            bias = ncl.sinkhorn_biases(sim, gamma, k)[side] if k else 0
            error[k] = (F.softmax((s + bias) / gamma, 1).sum(0) - 1).abs()
        assert error[500].max() < 1e-4 < error[4].max()
        assert error[0].mean() > 2 * error[4].mean() > 2 * error[20].mean() > error[500].mean()
        assert error[0].mean().item() == pytest.approx(common.normalization_error(s, gamma))
    adjusted = [sim, *(sim + ncl.sinkhorn_biases(sim, 0.01, k)[1] for k in (4, 50))]
    sharp = [common.normalization_error(s, 0.01) for s in adjusted]
    # four rounds at CLIP's temperature: better, far from fair
    assert sharp[0] > sharp[1] > sharp[2] and sharp[1] > 0.05


@pytest.mark.parametrize("gamma", [1e-6, 0.01, 1.0, 1e6])
def test_normalization_error_is_finite(gamma):
    assert 0 <= common.normalization_error(2 * torch.eye(5) - 1, gamma) < 1e-6
    assert math.isfinite(common.normalization_error(unit(6, 4) @ unit(9, 4, seed=1).T, gamma))


@pytest.mark.parametrize("iterations", [0, 1, 4, 50])
@pytest.mark.parametrize("gamma", [0.01, 0.07, 1.0])
def test_ncl_loss_against_a_loop(gamma, iterations):
    text, video = pairs(hub=0.5)
    t2v, v2t = loop_ncl(text, video, gamma, iterations)
    exact, rounded = pytest.approx((t2v + v2t) / 2, rel=1e-9), pytest.approx((t2v + v2t) / 2, rel=1e-3, abs=1e-5)
    for detach in (True, False):
        # normalised inside
        assert ncl.ncl_loss(3 * text, 0.1 * video, gamma, iterations, detach).item() == exact
        assert ncl.ncl_loss(text.float(), video.float(), gamma, iterations, detach).item() == rounded
        terms = ncl.ncl_terms(3 * text, 0.1 * video, gamma, iterations, detach)
        assert {k: v.item() for k, v in terms.items()} == pytest.approx({"L_t2v": t2v, "L_v2t": v2t}, rel=1e-9)
    assert ncl.ncl_loss(text, video, torch.tensor(gamma, dtype=torch.float64), iterations).item() == exact


def test_gradient_at_the_biases_is_equation_28(monkeypatch):
    """dL/db_j = -(1 - sum_i P(v_j | t_i)) / (2 B gamma); the same for a.

    In the paper b carries the 1 / gamma, here it is in cosine units.
    """
    text, video = pairs(hub=0.5)
    sim, gamma = text @ video.T, 0.05
    a, b = (x.clone().requires_grad_() for x in ncl.sinkhorn_biases(sim, gamma))
    P, Q = F.softmax((sim + b.detach()) / gamma, 1), F.softmax((sim.T + a.detach()) / gamma, 1)
    monkeypatch.setattr(ncl, "sinkhorn_biases", lambda *args: (a, b))
    ncl.ncl_loss(text, video, gamma, detach=False).backward()
    for leaf, p in ((b, P), (a, Q)):
        expected = -(1 - p.sum(0)) / (2 * N * gamma)
        assert torch.allclose(leaf.grad, expected, rtol=1e-9, atol=1e-12) and expected.abs().max() > 1e-3


def gradients(iterations, detach, gamma=0.05):
    gamma = torch.tensor(gamma, dtype=torch.float64, requires_grad=True)
    leaves = [x.requires_grad_() for x in pairs(24, 16, noise=1.5, hub=0.5)] + [gamma]
    return torch.autograd.grad(ncl.ncl_loss(*leaves, iterations, detach), leaves)


def test_detached_biases_have_the_full_gradient_at_convergence():
    for kept, free in zip(gradients(500, True)[:2], gradients(500, False)[:2]):
        assert ((kept - free).norm() / free.norm()).item() < 1e-6
    for kept, free in zip(gradients(4, True)[:2], gradients(4, False)[:2]):
        assert ((kept - free).norm() / free.norm()).item() > 0.01


def test_gradient_through_the_biases_is_the_derivative():
    leaves = [x.requires_grad_() for x in pairs(4, 3)] + [torch.tensor(0.2, dtype=torch.float64, requires_grad=True)]
    assert torch.autograd.gradcheck(lambda text, video, gamma: ncl.ncl_loss(text, video, gamma, detach=False), leaves)


def test_learnable_gamma_gets_the_gradient_at_fixed_biases(monkeypatch):
    text, video = pairs(hub=0.5)
    a, b = ncl.sinkhorn_biases(text @ video.T, 0.05)
    gamma = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    got, = torch.autograd.grad(ncl.ncl_loss(text, video, gamma), gamma)
    monkeypatch.setattr(ncl, "sinkhorn_biases", lambda *args: (a, b))
    step = 1e-6
    expected = (ncl.ncl_loss(text, video, 0.05 + step) - ncl.ncl_loss(text, video, 0.05 - step)) / (2 * step)
    assert got.item() == pytest.approx(expected.item(), rel=1e-5) and abs(got) > 1e-3


@pytest.mark.parametrize("margin", [0.0, 0.2, 2.5])
def test_max_margin_loss_against_a_loop(margin):
    text, video = pairs(noise=1.5)
    s, expected = (text @ video.T).tolist(), {"L_t2v": 0.0, "L_v2t": 0.0}
    for i in range(N):
        expected["L_t2v"] += max(0, margin - s[i][i] + max(s[i][j] for j in range(N) if j != i)) / N
        expected["L_v2t"] += max(0, margin - s[i][i] + max(s[j][i] for j in range(N) if j != i)) / N
    terms = ncl.max_margin_terms(2 * text, video, margin)
    assert {k: v.item() for k, v in terms.items()} == pytest.approx(expected) and min(expected.values()) > 0
    assert ncl.max_margin_loss(2 * text, video, margin).item() == pytest.approx(sum(expected.values()))
    assert ncl.max_margin_loss(torch.eye(4), torch.eye(4), 0.9) == 0


# ---------------------------------------------------- the queue ------------------------------------------------------
def numbered(first, last):
    """Unit rows that say which they are."""
    angle = torch.arange(first, last) / 10
    return torch.stack([angle.cos(), angle.sin()], 1)


def test_queue_keeps_the_last_queries_oldest_first():
    """Fig. 5 and eval.py --queue-size take the last rows of what it gives for the latest queries."""
    queue = ncl.QueryQueue(5, 2)
    assert queue.get().shape == (0, 2)
    # 2 and 3 do not divide 5; 12 is more than it holds
    for pushed, batch in ((2, 2), (4, 2), (6, 2), (8, 2), (11, 3), (12, 1), (24, 12), (26, 2)):
        queue.push(7 * numbered(pushed - batch, pushed).requires_grad_())  # any scale
        assert queue.count == pushed
        expected = numbered(max(0, pushed - 5), pushed)  # what is there, no zeros
        assert torch.allclose(queue.get(), expected, atol=1e-6)
    queue.push(numbered(0, 2).bfloat16())
    assert queue.get().dtype == torch.float32 and not queue.get().requires_grad
    assert set(queue.state_dict()) == {"queries", "count"}


# ---------------------------------------------------- test time ------------------------------------------------------
def pieces_of(text, image, owner=None, grouped=False):
    """What evaluation.retrieval.retrieval_pieces gives, for texts whose image is owner[i]."""
    owner = np.arange(len(text)) if owner is None else np.asarray(owner)
    groups = np.arange(len(image))
    return {"image": image, "text": text, "owner": owner, "data": SimpleNamespace(grouped=grouped),
            "positives": evaluation.retrieval.positives_table(groups[owner], groups),
            "positives_of_image": evaluation.retrieval.positives_table(groups, groups[owner])}


def hub_world(n=24, d=96):
    """Queries, their items and 20 n training queries of the same kind.

    All queries lean to one way; item 0 lies there, nearer to each query than its own item.
    """
    g = torch.Generator().manual_seed(0)
    way, own = F.normalize(torch.randn(d, generator=g), dim=0), F.normalize(torch.randn(n, d, generator=g), dim=1)
    queries = [own + 1.5 * way + 0.03 * torch.randn(n, d, generator=g) for _ in range(21)]
    return queries[0], own + 4 * way * F.one_hot(torch.tensor(0), n)[:, None], torch.cat(queries[1:])


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("way", ["text_to_image", "image_to_text"])
def test_a_hub_is_repaired(way, grouped):
    queries, items, seen = hub_world()
    if way == "text_to_image":
        pieces, stand_ins, side = pieces_of(queries, items, grouped=grouped), (seen, queries), 0
    else:
        pieces, stand_ins, side = pieces_of(items, queries, grouped=grouped), (queries, seen), 1
    results, biases = ncl.normalized_retrieval(pieces, 0.05, 4, *stand_ins)
    assert list(results) == list(biases) == ["none", "queue", "oracle"]
    assert results["none"][way]["R@1"] < 10 and not biases["none"][side].any()  # the hub answers every query
    for mode in ("queue", "oracle"):
        assert results[mode][way]["R@1"] == 100
        assert results[mode]["error"][way] < 0.5 * results["none"]["error"][way]
        assert biases[mode][side].argmin() == 0 and biases[mode][side].shape == (24,)  # it is pushed back


def test_the_queue_of_texts_serves_the_videos():
    """Text -> video needs biases of the videos, from queries that are texts: exchanged queues give other numbers."""
    text, video = pairs(20, hub=0.5)
    texts, videos = pairs(90, hub=0.5, seed=7)
    _, biases = ncl.normalized_retrieval(pieces_of(text, video), 0.05, 4, texts, videos)
    for mode, t, v in (("queue", texts, videos), ("oracle", text, video)):
        assert torch.allclose(biases[mode][0], loop_sinkhorn(t @ video.T, 0.05, 4)[1], atol=1e-9)
        assert torch.allclose(biases[mode][1], loop_sinkhorn(v @ text.T, 0.05, 4)[1], atol=1e-9)


def test_errors_are_those_of_the_adjusted_similarities():
    text, video = pairs(20, hub=0.5)
    results, biases = ncl.normalized_retrieval(pieces_of(text, video), 0.05, 50)
    for mode in ("none", "oracle"):
        sims = {"text_to_image": text @ video.T + biases[mode][0], "image_to_text": video @ text.T + biases[mode][1]}
        for way, sim in sims.items():
            expected = (1 - F.softmax(sim / 0.05, 1).sum(0)).abs().mean().item()
            assert results[mode]["error"][way] == pytest.approx(expected)
    assert all(results["oracle"]["error"][way] < 0.1 * results["none"]["error"][way] for way in BOTH)


def test_grouped_sets_rank_as_a_loop():
    """The whole protocol on uneven captions: biases per caption, maximum per video, rank of the own video.

    text -> video as ever.
    """
    image, owner = pairs(15, hub=0.5)[1], np.repeat(np.arange(15), [1, 2, 3] * 5)
    text = F.normalize(image[owner] + 0.9 * unit(30, D, seed=3), dim=1)
    results, _ = ncl.normalized_retrieval(pieces_of(text, image, owner, grouped=True), 0.05, 4)
    a, b = loop_sinkhorn(image @ text.T, 0.05, 4)[1], loop_sinkhorn(text @ image.T, 0.05, 4)[1]
    ranks = {"before": [], "after": []}
    for i, row in enumerate((image @ text.T).tolist()):
        own = [[j for j in range(30) if owner[j] == k] for k in range(15)]
        scores = {"before": [max(row[j] + a[j].item() for j in group) for group in own], "after": []}
        for group in own:
            j = max(group, key=lambda j: row[j])
            scores["after"].append(row[j] + a[j].item())
        for when, s in scores.items():
            ranks[when].append(1 + sum(x >= s[i] for k, x in enumerate(s) if k != i))
    before, after = (pytest.approx(np.mean(ranks[when])) for when in ("before", "after"))
    assert results["oracle"]["image_to_text"]["MnR"] == before != after
    s = text @ image.T + b
    found = []
    for i, row in enumerate(s.tolist()):
        found.append(1 + sum(x >= row[owner[i]] for k, x in enumerate(row) if k != owner[i]))
    assert results["oracle"]["text_to_image"]["MnR"] == pytest.approx(np.mean(found))


# ---------------------------------------------------- Eq. 5 ---------------------------------------------------------
def test_normalization_error():
    assert common.normalization_error(torch.zeros(7, 7), 0.05) == pytest.approx(0)  # every item collects one query
    assert common.normalization_error(torch.eye(7), 0.05) == pytest.approx(0)
    p, q = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(1))  # rows (p, 1 - p), (q, 1 - q)
    assert common.normalization_error(torch.tensor([[0.2, 0.0], [0.0, 0.1]]), 0.1) == pytest.approx(abs(p + q - 1))
    # one hub of two: (|1 - 2| + |1 - 0|) / 2
    assert common.normalization_error(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), 0.01) == pytest.approx(1)
    assert common.normalization_error(torch.ones(3, 1), 0.05) == pytest.approx(0)  # all queries to the only item


def test_normalization_error_of_other_counts():
    """m queries and n items: a fair item collects m / n; the error is relative to that."""
    assert common.normalization_error(torch.zeros(10, 4), 0.05) == pytest.approx(0)
    # 4, 2 and 0 queries, 2 each were fair
    sim = torch.tensor([[1.0, 0, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0]])
    assert common.normalization_error(sim, 0.01) == pytest.approx((1 + 0 + 1) / 3)
    sim = torch.randn(5000, 3, generator=torch.Generator().manual_seed(0))  # in two parts
    expected = (1 - F.softmax(sim.double() / 0.5, 1).sum(0) * 3 / 5000).abs().mean().item()
    assert common.normalization_error(sim, 0.5) == pytest.approx(expected)


# ---------------------------------------------------- runs -----------------------------------------------------------
def main(folder, *flags, base=SMALL, pictures=False, script=ncl):
    return run_script(script, folder, *flags, base=base, pictures=pictures)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with everything, pictures too: its folder and its summary."""
    folder = tmp_path_factory.mktemp("ncl") / "run"
    return folder, main(folder, "--eval-every", 2, pictures=True)


def test_a_run_leaves_every_normalisation(run):
    folder, summary = run
    assert summary["method"] == "ncl" and summary["steps"] == 4
    found, chance = (summary[k]["moving-emoji"] for k in ("test", "chance"))
    assert chance["modality_gap"] == pytest.approx((1 / found["images"] + 1 / found["captions"]) ** 0.5)
    for split in ("val", "test"):
        m = summary[split]["moving-emoji"]
        assert list(m["normalize"]) == ["none", "queue", "oracle"]
        # those of --normalize stand in front
        assert m["text_to_image"] == m["normalize"]["queue"]["text_to_image"] != m["normalize"]["none"]["text_to_image"]
        none, oracle = (m["normalize"][mode]["error"]["text_to_image"] for mode in ("none", "oracle"))
        assert oracle < 0.1 * none
    log = rows(folder)
    assert list(log[0]["eval"]["moving-emoji"]["normalize"]) == ["none", "oracle"]  # step 0: nothing is in the queue
    assert all(r["error_normalized"] < r["error"] and r["tau"] == 0.1 for r in log if "loss" in r)
    pictures = {"curves.png", "normalization.png", "modalities.png", "retrieval.png"}
    files = {"queues.safetensors", "embeddings_before.safetensors", "summary.json"}
    assert {p.name for p in folder.iterdir()} >= pictures | files
    assert all(p.stat().st_size > 5000 for p in folder.glob("*.png"))


def test_the_figures_have_a_fork_s_biases(tmp_path, monkeypatch):
    """R@1 by the size of the queue (Fig. 5) is found with the script's own retrieval_biases: the fork's put the first
    item in front of all others."""
    own = fork(ncl, tmp_path, "return gamma * log_beta.log_softmax(0)\n",
               "return 9.0 * (torch.arange(len(items)) == 0)\n")
    drawn = []
    monkeypatch.setattr(figures.ncl, "save_figure", lambda *args: drawn.append(args))
    summary = main(tmp_path / "fork", script=own, pictures=True)
    reported = summary["test"]["moving-emoji"]["normalize"]["queue"]
    lines = {line.get_label(): line.get_ydata() for line in panel(drawn, "(Fig. 5)").lines}
    for label, way in {"text -> video": "text_to_image", "video -> text": "image_to_text"}.items():
        assert len(lines[label]) > 1 and set(lines[label]) == {reported[way]["R@1"]}
    assert lines["video -> text"][0] == pytest.approx(100 / 16)            # the first text is right for one of 16


@pytest.mark.parametrize("normalize", ["none", "oracle"])
def test_normalize_chooses_the_reported_numbers(run, normalize):
    folder, whole = run
    summary = main(folder.parent / normalize, "--normalize", normalize)
    for split in ("val", "test"):
        m = summary[split]["moving-emoji"]
        assert m["normalize"] == whole[split]["moving-emoji"]["normalize"]  # the training is the same
        assert all(m[k] == m["normalize"][normalize][k] for k in ("text_to_image", "image_to_text", "R-Mean"))


def test_the_queues_are_the_training_batches(tmp_path):
    """With a learning rate of 0 the queues can be computed again: row k is the k-th training example.

    No caption or clip of val or test.
    """
    main(tmp_path / "still", "--lr", 0, "--lr-end", 0, "--crop-min", 1, "--jitter", 0, "--eval-every", 1)
    queues = load_file(tmp_path / "still" / "queues.safetensors")
    model, tokenizer, transform = common.load_model(tmp_path / "still")
    device = torch.device("cpu")
    def encoded(split):
        data = common.load_data("moving-emoji", split, frames=4, image_size=32, clips=[64, 16, 16])
        index, video, _, _ = evaluation.embed.encode_images(model, data, transform, device)
        captions = [[data.captions(i)[k] for i in index] for k in range(3)]
        texts = [evaluation.embed.encode_texts(model, tokenizer, c, device) for c in captions]
        return common.normalize(video), common.normalize(torch.stack(texts))  # (M, D), (3, M, D)
    order = torch.from_numpy(np.concatenate([batch for _, batch in epoch_batches(64, 16, 42, 0, 4)]))
    video, text = encoded("train")
    assert torch.allclose(queues["videos"], video[order], atol=1e-4)
    # one of the example's three captions
    assert ((queues["texts"] - text[:, order]).abs().amax(2).amin(0) < 1e-4).all()
    for split in ("val", "test"):
        video, text = encoded(split)
        assert torch.cdist(queues["videos"], video).min() > 1e-3
        assert torch.cdist(queues["texts"], text.flatten(0, 1)).min() > 1e-3


LEARNT = ["--learnable-tau"]
OTHERS = ["--loss infonce", "--loss max-margin", " ".join(LEARNT), "--iterations 1", "--queue-size 7",
          "--mixed-precision bf16", "--loss-scale 3", "--frames 2"]


@pytest.mark.parametrize("words", OTHERS)
def test_every_flag_has_an_effect(run, words, tmp_path, capsys):
    """Both directions are logged by their names in the paper, without --loss-scale, and the banner's random guess is in
    the unit of the loss."""
    folder, base = run
    flags = words.split()
    summary, log = main(tmp_path / "a", *flags), steps(tmp_path / "a")
    scale, whole = (3 if "--loss-scale" in flags else 1), words == "--loss max-margin"
    guess = scale * (2 * 0.2 if whole else math.log(16))
    assert f"random guess loss {guess:.3f}\n" in capsys.readouterr().out
    for row in log:
        assert row["loss"] == pytest.approx(scale * (row["L_t2v"] + row["L_v2t"]) / (1 if whole else 2), rel=1e-5)
    changed = load_file(tmp_path / "a" / "queues.safetensors")
    if flags[0] == "--queue-size":
        assert len(changed["texts"]) == len(changed["videos"]) == 7 and losses(tmp_path / "a") == losses(folder)
        return
    assert losses(tmp_path / "a") != losses(folder)
    assert not torch.equal(changed["videos"], load_file(folder / "queues.safetensors")["videos"])
    if flags[0] == "--loss-scale":
        assert log[0]["loss"] == pytest.approx(3 * losses(folder)[0], rel=1e-5)
    if "--learnable-tau" in flags:
        taus = [r["tau"] for r in log]
        assert all(t >= 0.01 and abs(t - 0.1) > 1e-5 for t in taus)
        assert changed["gamma"].item() == pytest.approx(taus[-1], rel=1e-6)
        assert summary["parameters"] == base["parameters"] + 1


def test_the_loss_in_blocks(run, tmp_path, monkeypatch):
    cut, in_rows = [], common.checkpoint
    monkeypatch.setattr(common, "checkpoint", lambda f, x, *a, **how: cut.append(len(x)) or in_rows(f, x, *a, **how))
    monkeypatch.setattr(common, "rows_at_once", lambda *_: 5)
    main(tmp_path / "a")
    assert set(cut) == {5, 1}  # of 16 rows
    assert losses(tmp_path / "a") == pytest.approx(losses(run[0]), rel=1e-3)


def test_image_sets_work_too(tmp_path):
    flags = ["--dataset", "emoji", "--image-size", 16, "--batch-size", 64]
    summary = main(tmp_path / "emoji", *flags, base=[*BASE, "--max-steps", "2"])
    assert summary["steps"] == 2 and list(summary["test"]["emoji"]["normalize"]) == ["none", "queue", "oracle"]
    assert math.isfinite(losses(tmp_path / "emoji")[-1])
    assert len(load_file(tmp_path / "emoji" / "queues.safetensors")["texts"]) == 128


# ---------------------------------------------------- resume and several processes -----------------------------------
LONG = [*BASE, "--clips", "160", "16", "16", "--batch-size", "64", "--max-steps", "12", "--save-every", "4"]
LONG += ["--log-every", "1", "--eval-every", "0", "--queue-size", "100"]
LONG += ["--lr", "1e-4"]  # AdamW lets rounding grow: 6e-8 at step 1 becomes 5e-7 at step 12, with 3e-4 it becomes 1e-4


@pytest.fixture(scope="module")
def long_runs(tmp_path_factory):
    """{name: (folder, summary)}: whole; killed (SIGKILL after step 5 or so) and resumed; two processes."""
    root = tmp_path_factory.mktemp("long")
    flags = [*LONG, "--output-dir", root, "--run-name"]
    killed = launch.start("ncl", [*flags, "killed"], root / "killed.txt", hold=10)
    while not any(r["step"] >= 5 for r in steps(root / "killed")):
        assert killed.is_alive(), (root / "killed.txt").read_text()[-3000:]
        time.sleep(0.005)
    killed.kill()
    killed.join(300)
    whole = main(root / "whole", base=LONG)
    last = next(iter(engine.checkpoints.checkpoints_of(root / "killed")), None)
    assert last and last.stem != "step_12", "killed too early or too late"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ncl, "draw", lambda *args: None)
        resumed = ncl.main(ncl.parse_args(["--resume", str(root / "killed")]))
    launch.finish("ncl", [*flags, "two"], root / "two.txt", processes=2)
    summaries = {"whole": whole, "killed": resumed, "two": read_json(root / "two" / "summary.json")}
    return {name: (root / name, summary) for name, summary in summaries.items()}


def test_killed_and_resumed_is_the_uninterrupted_run(long_runs):
    (whole, expected), (killed, summary) = long_runs["whole"], long_runs["killed"]
    for file in ("model.safetensors", "queues.safetensors", "checkpoints/step_12.pt"):
        assert equal_files(whole / file, killed / file), file
    last = tensors_of(killed, 12)
    own = {k.removeprefix("own/") for k in last if k.startswith("own/")}
    assert {"texts.queries", "texts.count", "videos.queries", "videos.count"} == own
    assert len(load_file(killed / "queues.safetensors")["videos"]) == 100  # it has wrapped around
    assert losses(killed) == losses(whole) and [r["step"] for r in steps(whole)] == list(range(1, 13))
    assert summary["test"] == expected["test"] and summary["val"] == expected["val"]


def test_two_processes_are_one(long_runs):
    (one, expected), (two, summary) = long_runs["whole"], long_runs["two"]
    assert summary["processes"] == 2 and losses(two) == pytest.approx(losses(one), rel=1e-3)
    a, b = (load_file(f / "queues.safetensors") for f in (one, two))
    assert all(torch.allclose(a[k], b[k], atol=1e-3) for k in a)  # the order too
    for split in ("val", "test"):
        a, b = (s[split]["moving-emoji"] for s in (expected, summary))
        assert flatten(a).keys() == flatten(b).keys()
        assert all(a[k] == b[k] for k in ("images", "captions", "unreadable"))
        for mode in ("none", "queue", "oracle"):  # rounding may turn a rank or two
            assert b["normalize"][mode]["R-Mean"] == pytest.approx(a["normalize"][mode]["R-Mean"], abs=3)
            assert b["normalize"][mode]["error"] == pytest.approx(a["normalize"][mode]["error"], rel=0.02, abs=1e-3)


def test_two_processes_evaluate_as_one(long_runs, tmp_path):
    """The same weights: before training, and the end of the run on two processes seen by eval.py on one."""
    a, b = (flatten(rows(long_runs[name][0])[0]) for name in ("whole", "two"))
    words = {key for key, value in a.items() if isinstance(value, str)}  # which normalisation the numbers have
    assert a["step"] == 0 and a.keys() == b.keys() and all(a.pop(key) == b.pop(key) for key in words)
    assert b == pytest.approx(a, rel=1e-4, abs=1e-4)
    folder, summary = long_runs["two"]
    got = evaluate(folder, tmp_path, "--normalize", "queue")["normalize"]
    assert same_numbers(got, summary["test"]["moving-emoji"]["normalize"])


# ---------------------------------------------------- eval.py -------------------------------------------------------
def same_numbers(a, b):
    """Nested dicts of the same keys, with the same numbers up to rounding."""
    return flatten(a) == pytest.approx(flatten(b), rel=1e-4, abs=1e-4)


def evaluate(checkpoint, out, *flags, pictures=False):
    """Metrics of the checkpoint's own data set."""
    with pytest.MonkeyPatch.context() as patch:
        if not pictures:
            patch.setattr(eval_py, "draw_normalization", lambda *args: None)
            patch.setattr(eval_py, "draw_retrieval", lambda *args, **options: None)
        command = [*BASE, "--workers", "0", "--tasks", "retrieval", "--checkpoint", str(checkpoint)]
        command += ["--output-dir", str(out), *map(str, flags)]
        result = eval_py.main(eval_py.parse_args(command))
    one, = result["datasets"].values()
    return one["metrics"]


@pytest.mark.parametrize("normalize", ["none", "queue", "oracle"])
def test_eval_gives_the_numbers_of_the_run(run, normalize, tmp_path):
    folder, summary = run
    own = summary["test"]["moving-emoji"]["normalize"]
    got = evaluate(folder, tmp_path, "--normalize", normalize, pictures=normalize != "oracle")
    numbers = {k: v for k, v in flatten(own[normalize]).items() if not k.startswith("error")}
    assert numbers.items() <= flatten(got).items()
    if normalize != "none":
        assert flatten(got["normalize"]) == pytest.approx(flatten(own), rel=1e-4, abs=1e-4)
    one, other = "retrieval_moving-emoji.png", "normalization_moving-emoji.png"
    drawn = {"none": {one}, "queue": {one, other}, "oracle": set()}
    assert {p.name for p in tmp_path.glob("*.png") if p.stat().st_size > 5000} == drawn[normalize]


def test_eval_options_of_the_normalisation(run, tmp_path):
    own = evaluate(run[0], tmp_path, "--normalize", "queue")["normalize"]
    same_as = {"--gamma 0.01": [], "--queue-size 5": ["none", "oracle"]}
    for flags, same in same_as.items():
        got = evaluate(run[0], tmp_path, "--normalize", "queue", *flags.split())["normalize"]
        assert [k for k in ("none", "queue", "oracle") if got[k] == own[k]] == same
        if "--queue-size 5" == flags:  # the latest ones
            queues, device = load_file(run[0] / "queues.safetensors"), torch.device("cpu")
            model, tokenizer, transform = common.load_model(run[0])
            data = common.load_data("moving-emoji", "test", image_size=transform.size, clips=[64, 16, 16])
            index, image, _, _ = evaluation.embed.encode_images(model, data, transform, device)
            pieces = evaluation.retrieval.retrieval_pieces(model, tokenizer, data, index, image, device)
            latest = queues["texts"][-5:], queues["videos"][-5:]
            assert same_numbers(got, ncl.normalized_retrieval(pieces, queues["gamma"].item(), 4, *latest)[0])


def test_eval_takes_the_iterations_of_the_run(tmp_path):
    summary = main(tmp_path / "a", "--iterations", 1)
    got = evaluate(tmp_path / "a", tmp_path / "eval", "--normalize", "queue")["normalize"]
    assert same_numbers(got, summary["test"]["moving-emoji"]["normalize"])


OF_TEMO = ["--dataset", "moving-emoji"]


@pytest.mark.parametrize("script", [ncl, temo])
def test_eval_takes_the_learnt_gamma(script, tmp_path):
    more = [*OF_TEMO, "--loss", "infonce"] if script is temo else []
    main(tmp_path / "a", *more, "--learnable-tau", "--lr", 0.02, script=script)
    taus = [r["tau"] for r in steps(tmp_path / "a")]
    assert abs(taus[-1] / read_json(tmp_path / "a" / "args.json")["tau"] - 1) > 0.01
    got, given = (evaluate(tmp_path / "a", tmp_path / "eval", "--normalize", "oracle", *flags)["normalize"]
                  for flags in ([], ["--gamma", taus[-1]]))
    assert flatten(got) == pytest.approx(flatten(given), rel=1e-4, abs=1e-4)


@pytest.fixture(scope="module")
def temo_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("temo") / "r"
    return folder, main(folder, *OF_TEMO, script=temo)


def test_eval_normalizes_checkpoints_of_other_scripts(temo_run, tmp_path):
    """No queue there: it is filled from the training set, its clips and all their captions."""
    folder, summary = temo_run
    own = summary["test"]["moving-emoji"]
    got = evaluate(folder, tmp_path / "queue", "--normalize", "queue")
    assert got["normalize"]["none"]["text_to_image"] == own["text_to_image"]
    assert got["text_to_image"] == got["normalize"]["queue"]["text_to_image"]
    assert got["normalize"]["queue"]["error"]["text_to_image"] < got["normalize"]["none"]["error"]["text_to_image"]
    (model, tokenizer, transform), device = common.load_model(folder), torch.device("cpu")
    train, test = (common.load_data("moving-emoji", split, frames=4, image_size=transform.size, clips=[64, 16, 16])
                   for split in ("train", "test"))
    captions = [c for i in range(64) for c in train.captions(i)]
    videos = evaluation.embed.encode_images(model, train, transform, device)[1]
    texts = evaluation.embed.encode_texts(model, tokenizer, captions, device)
    index, image, _, _ = evaluation.embed.encode_images(model, test, transform, device)
    pieces = evaluation.retrieval.retrieval_pieces(model, tokenizer, test, index, image, device)
    expected, _ = ncl.normalized_retrieval(pieces, read_json(folder / "args.json")["tau"], 4, texts, videos)
    assert flatten(got["normalize"]) == pytest.approx(flatten(expected), rel=1e-4, abs=1e-4)


def test_modalities_show_one_caption_of_each_clip():
    """Captions of one clip are alike: the first 500 texts would be a few clips' and their mean cosine too high."""
    owner = np.repeat(np.arange(600), 3)
    pieces = {"owner": owner, "text": torch.arange(1800.0)[:, None], "image": torch.arange(600.0)[:, None]}
    found = figures.ncl.first_captions(pieces)
    assert found["text"][:, 0].tolist() == [3.0 * k for k in range(500)]
    assert found["image"][:, 0].tolist() == [float(k) for k in range(500)]


# ---------------------------------------------------- precomputed features -------------------------------------------
SSB = ("--image-encoder ssb --captioning-weight 0 --text-encoder small --text-pooling mean --no-pretrained "
       "--embed-dim 16 --text-length 12 --frames 3").split()


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """40 clips as SSB has them, and a csv: motion (time, 6) and appearance (time, 4) of one file each, other times."""
    root = tmp_path_factory.mktemp("features")
    helpers.write_features(root)
    captions = [(f"clip{i}", f"{w} number {i}", f"c{i % 2}") for i in range(40) for w in ("one", "another")]
    return root, write_rows(root / "clips.csv", ["video", "caption", "label"], captions)


def test_features_end_to_end(features, tmp_path):
    root, csv = features
    folders = [root / "motion", root / "appearance"]
    flags = ["--dataset", csv, *SSB, "--feature-dir", *folders]
    base = [*BASE, "--workers", "0", "--batch-size", "8", "--max-steps", "3", "--log-every", "1"]
    summary = main(tmp_path / "r", *flags, base=base, pictures=True)
    assert summary["steps"] == 3 and summary["bad_samples"] == 0
    assert losses(tmp_path / "r")[0] == pytest.approx(15 * math.log(8), rel=0.5)
    assert {"normalization.png", "retrieval.png"} <= {p.name for p in (tmp_path / "r").iterdir()}
    assert summary["chance"][str(csv)]["trivial"].keys() == {"untrained"}  # features have no pixels and no colours
    got = evaluate(tmp_path / "r", tmp_path / "eval", "--normalize", "queue")
    assert same_numbers(got["normalize"], summary["test"][str(csv)]["normalize"])


def test_val_held_out_of_a_set_that_has_none(tmp_path, capsys):
    """MSR-VTT (here with features): --eval-every has nothing to look at and says so; --hold-out-val takes it out of
    training, by the names of the videos, and eval.py finds the same val, training set and numbers."""
    names, rng = [f"video{i}" for i in range(200)], np.random.default_rng(0)
    held = {n for n in names if held_out_place(f"{n}.mp4") < HELD_OUT}
    names = [n for n in names if n not in held][:20] + sorted(held)[:4]
    held &= set(names)
    (tmp_path / "motion").mkdir()
    for name in [*names, "video999"]:
        np.save(tmp_path / "motion" / f"{name}.npy", rng.normal(size=(3, 6)).astype(np.float32))
    for part, some in (("train_9k", names), ("test_1k", ["video999"])):
        rows_of = [{"video_id": n, "video": f"{n}.mp4", "caption": [f"{n} moves", f"here is {n}"]} for n in some]
        (tmp_path / f"msrvtt_{part}.json").write_text(json.dumps(rows_of))
    flags = ["--dataset", "msrvtt", "--data-dir", tmp_path, *SSB, "--feature-dir", tmp_path / "motion", "--queue-size",
             40, "--eval-every", 1]
    base = [*BASE, "--workers", "0", "--batch-size", "8", "--max-steps", "2"]
    with pytest.raises(UserError, match="--eval-every 1: msrvtt without a val split.*; --hold-out-val takes"):
        main(tmp_path / "no", *flags, base=base)
    summary = main(tmp_path / "r", *flags, "--hold-out-val", base=base)
    log = [r for r in rows(tmp_path / "r") if "eval" in r]
    assert [r["step"] for r in log] == [0, 1, 2] and log[0]["eval"]["msrvtt"]["images"] == len(held) == 4
    assert "data         40 training examples" in capsys.readouterr().out  # 20 videos of two captions, none of val
    got = evaluate(tmp_path / "r", tmp_path / "eval", "--split", "val", "--normalize", "queue")
    assert got["images"] == 4 and same_numbers(got["normalize"], summary["val"]["msrvtt"]["normalize"])


def test_sets_without_a_queue_are_not_normalised_in_silence(tmp_path, capsys):
    """Training: the banner and the table say so. eval.py fills a queue from that set's training split, or ends."""
    folder = tmp_path / "r"
    summary = main(folder, "--eval-datasets", "moving-emoji", "emoji")
    out = capsys.readouterr().out
    assert "of moving-emoji; other sets without biases" in out
    assert "normalized_by queue" in out and "normalized_by none" in out
    assert summary["test"]["emoji"]["normalized_by"] == "none"
    assert summary["test"]["emoji"]["R-Mean"] == summary["test"]["emoji"]["normalize"]["none"]["R-Mean"]
    got = evaluate(folder, tmp_path / "1", "--normalize", "queue", "--datasets", "emoji", "--queue-size", 50)
    assert "emoji: --normalize queue: by 50 texts and 50 items of its train split" in capsys.readouterr().out
    assert got["normalized_by"] == "queue"
    assert got["text_to_image"] == got["normalize"]["queue"]["text_to_image"]
    for i in range(4):
        write_images(tmp_path / "photos" / "test", [i])
    write_rows(tmp_path / "photos" / "test" / "metadata.csv", ["file_name", "caption"],
               [(f"{i:03}.png", f"picture {i}") for i in range(4)])
    with pytest.raises(UserError, match="no train split"):
        evaluate(folder, tmp_path / "2", "--normalize", "queue", "--datasets", tmp_path / "photos")
    capsys.readouterr()
    assert "oracle" in refused(eval_py.parse_args, "--checkpoint x --normalize queue --split train".split(), capsys)


# ---------------------------------------------------- flags ---------------------------------------------------------
def test_dropout_of_the_feature_tower_acts(features, tmp_path):
    root, csv = features
    flags = ["--dataset", csv, *SSB, "--feature-dir", root / "motion", "--lr", 0]
    base = [*BASE, "--workers", "0", "--batch-size", "8", "--max-steps", "2", "--log-every", "1"]
    found = {}
    for dropout in (0, 0.5):
        summary = main(tmp_path / str(dropout), *flags, "--dropout", dropout, base=base)
        found[dropout] = losses(tmp_path / str(dropout)), summary["test"][str(csv)]["R-Mean"]
    assert found[0.5][0] != found[0][0] and found[0.5][1] == found[0][1]  # none in evaluation, and no lr


BAD = {
    "--loss max-margin --learnable-tau": "--learnable-tau: only with --loss ncl or infonce",
    "--image-encoder ssb": "--feature-dir",
    "--feature-dir .": "--feature-dir: only with --image-encoder ssb",
    "--dropout 0.1": "--dropout: only with --image-encoder ssb",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_flags(flags, capsys):
    assert BAD[flags] in refused(ncl.parse_args, flags.split(), capsys)


def test_bad_data(features, tmp_path):
    root, csv = features
    def stopped(*flags):
        with pytest.raises(UserError) as error:
            main(tmp_path / "r", *flags)
        assert "\n" not in str(error.value)
        return str(error.value)
    (tmp_path / "empty").mkdir()
    by_features = ["--dataset", csv, *SSB, "--feature-dir"]
    message = stopped(*by_features, tmp_path / "empty")
    assert message.startswith(f"--dataset {csv}: ") and "no file is found (looked for clip0)" in message
    (tmp_path / "bad").mkdir()
    for i in range(40):
        np.save(tmp_path / "bad" / f"clip{i}.npy", np.full((3, 4), np.nan))
    assert "features that are not finite" in stopped(*by_features, tmp_path / "bad", "--batch-size", 8)


# ----------------------------------------------------- reviewed points ----------------------------------------------
def test_recipes_of_the_paper():
    """App. B: epochs 5, 3 and 10, warm-up over a tenth except on MSVD, 32 or 64 tokens, 12 or 64 frames, a queue of
    16,384; Sec. 3.2: 4 rounds; images: CC3M's tars by an index."""
    facts = {"msrvtt": (5, 0.1, 32, 12), "msvd": (3, 0, 32, 12), "activitynet": (10, 0.1, 64, 64)}
    for name, expected in facts.items():
        args = ncl.parse_args(["--dataset", name])
        assert (args.epochs, args.warmup_fraction, args.text_length, args.frames) == expected
        assert args.warmup_epochs == 0
        assert (args.lr, args.batch_size, args.queue_size, args.iterations) == (1e-7, 128, 16_384, 4)
        assert (args.tau, args.learnable_tau, args.normalize, args.dropout) == (0.01, True, "queue", 0)
        assert args.unfold_captions == (name != "activitynet")
    assert ncl.parse_args(["--dataset", "msrvtt", "--tau", "0.07"]).tau == 0.07
    assert ncl.parse_args(["--dataset", "msrvtt", "--loss", "infonce"]).normalize == "none"
    assert not ncl.parse_args(["--dataset", "msrvtt", "--loss", "max-margin"]).learnable_tau
    cc3m = ncl.parse_args(["--dataset", "cc3m"])
    assert not cc3m.streaming and cc3m.image_encoder.startswith("openai/clip") and not cc3m.unfold_captions
    assert ncl.parse_args(["--dataset", "cc3m", "--streaming"]).streaming


def test_a_query_that_finds_one_of_its_right_items_is_no_mistake():
    """Fig. 3: four queries of items 0 and 1 find 0; two of item 2 find 2 and 0."""
    sim = F.one_hot(torch.tensor([0, 0, 0, 0, 2, 0]), 3).float()
    positives = torch.tensor([[0, 1]] * 4 + [[2, -1]] * 2)
    missed, wrong = figures.ncl.mistakes(sim, positives)
    assert missed.tolist() == [0, 0, 0.5] and wrong.tolist() == [0.5, 0, 0]


def test_retrieval_biases_in_blocks_are_sinkhorn_s():
    """Blocks of 1,024 queries: the same biases as on the whole matrix, with the memory of a block."""
    items, queries = unit(50, D), unit(2500, D, seed=1)
    for gamma in (0.01, 0.1):
        expected = ncl.sinkhorn_biases(queries @ items.T, gamma)[1]
        assert torch.allclose(ncl.retrieval_biases(2 * items, 5 * queries, gamma), expected, atol=1e-9)


def test_the_same_queries_before_and_after(tmp_path, monkeypatch):
    """Fig. 6: each query twice, with the cosine and what the clip collects of all queries' probabilities."""
    image, text = unit(12, 4).float(), unit(12, 4, seed=1).float()
    data = common.load_data("moving-emoji", "test", clips=[12, 12, 12], image_size=16)
    pieces = {"image": image, "text": text, "owner": torch.arange(12), "positives": torch.arange(12)[:, None],
              "texts": [f"text {i}" for i in range(12)], "index": torch.arange(12), "data": data}
    bias = ncl.retrieval_biases(image, text, 0.1)
    pieces["biases"] = {"oracle": (bias, torch.zeros(12))}
    drawn = []
    monkeypatch.setattr(figures.base, "save_figure", lambda *args: drawn.append(args))
    figures.ncl.draw_before_after(pieces, 0.1, "oracle", tmp_path / "r.png")
    (fig, _), sim = drawn[0], text @ image.T
    rows = [fig.axes[3 * r:3 * r + 3] for r in range(6)]
    for r, shift in enumerate((torch.zeros(12), bias) * 3):
        query = int(rows[r - r % 2][0].get_ylabel().split()[2])
        shares = ((sim + shift) / 0.1).softmax(1).sum(0)
        best = (sim + shift)[query].topk(3).indices
        assert [ax.get_xlabel() for ax in rows[r]] == [f"{sim[query, j]:.2f}, sum {shares[j]:.2f}" for j in best]
        found = "hit" if best[0] == query else "miss"
        assert rows[r][0].get_ylabel().replace("\n", " ") == f"{found}: " + ("the same with biases" if r % 2 else
                                                                             f"text {query}")


def test_the_warm_up_is_a_part_of_the_run(tmp_path, capsys):
    """CLIP4Clip's 10 %, however many epochs; either flag replaces the recipe's, both are refused."""
    def of(*flags):
        args = ncl.parse_args([*map(str, flags)])
        return args.warmup_epochs, args.warmup_fraction
    assert of("--dataset", "msrvtt", "--epochs", 20) == (0, 0.1) and of("--warmup-fraction", 0.2) == (0, 0.2)
    assert of("--dataset", "msrvtt", "--warmup-epochs", 1) == (1, 0) and of() == (2, 0)
    assert of("--dataset", "msrvtt", "--image-encoder", "ssb", "--feature-dir", tmp_path) == (0, 0)
    assert "give one of them" in refused(ncl.parse_args, ["--warmup-fraction", ".1", "--warmup-epochs", "1"], capsys)
    main(tmp_path / "r", "--max-steps", 8, "--warmup-fraction", 0.5)
    rates = [row["lr"] for row in steps(tmp_path / "r")]
    assert rates[:4] == pytest.approx([2e-3 * k / 4 for k in (1, 2, 3, 4)]) and rates[7] < rates[4] <= 2e-3


def test_clip4clip_freezes_embeddings_and_first_norms(tiny, tmp_path, capsys):
    """As its scripts do (--freeze_layer_num 0): these stay as they were, all else learns; others are refused."""
    name, model = tiny("clip")
    clip = ["--image-encoder", name, "--text-encoder", name, "--pretrained", "--image-size", 32, "--text-length", 12,
            "--embed-dim", 16, "--max-steps", 2, "--lr", 0.01, "--weight-decay", 0.2]
    main(tmp_path / "r", *clip, "--freeze", "clip4clip")
    assert "clip4clip" in next(line for line in capsys.readouterr().out.splitlines() if "  frozen" in line)
    main(tmp_path / "all", *clip)
    frozen, free = (load_file(tmp_path / run / "model.safetensors") for run in ("r", "all"))
    still = set()
    for key, value in model.state_dict().items():
        half, _, rest = key.partition("_model.")
        found = f"{half}.body.{rest}"
        if found in frozen and value.is_floating_point():
            assert not torch.equal(free[found], value), found
            still |= {rest} if torch.equal(frozen[found], value) else set()
    assert still == {"embeddings.class_embedding", "embeddings.patch_embedding.weight", "pre_layrnorm.weight",
                     "embeddings.position_embedding.weight", "embeddings.token_embedding.weight", "pre_layrnorm.bias"}
    with pytest.raises(UserError, match="--freeze clip4clip: is for a CLIP as both encoders"):
        main(tmp_path / "small", "--freeze", "clip4clip")
    freezes = [ncl.parse_args(["--dataset", "msrvtt", *more]).freeze for more in (
        [], ["--image-encoder", "resnet18"], ["--image-encoder", "openai/clip-vit-base-patch16"])]
    assert freezes == ["clip4clip", "none", "clip4clip"] and ncl.parse_args([]).freeze == "none"
