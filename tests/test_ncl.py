"""NCL: Sinkhorn biases and losses against loops, the queue, normalisation at test time. test_ssb.py
has SSB."""

import math
from types import SimpleNamespace

import common
import contrastive.figures.ncl  # noqa: F401  (figures.ncl)
from contrastive import evaluation, figures
from contrastive.data.batches import epoch_batches
from contrastive.core.files import flatten
from contrastive.core.processes import UserError
from contrastive.evaluation.pieces import EvaluationPieces
from contrastive.evaluation.saved_pieces import SavedPieces, read_pieces
from contrastive.figures import draw, figures_of_runs

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import ncl
from helpers import (
    CPU, evaluated, few_steps, fork, refused, rows, run_script, steps, tensors_of, unit)

N, D = 12, 6
SMALL = (
    "--cpu --workers 0 --clips 64 16 16 --frames 2 --image-size 16 --batch-size 16 --max-steps 4 "
    "--log-every 1 --eval-every 0"
).split()


def pairs(n=N, d=D, noise=0.7, hub=0.5, seed=0):
    """Texts and videos near them, (n, d) float64 each, which lean by other lengths to where all
    texts lean: hub."""
    text, other, way = unit(n, d, seed=seed), unit(n, d, seed=seed + 1), unit(1, d, seed=seed + 2)
    lean = hub * torch.rand(
        n, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return F.normalize(text + hub * way, dim=1), F.normalize(
        text + noise * other + 2 * lean * way, dim=1
    )


# ---------------------------------------------------- Sinkhorn and the losses ---------------------
def log_sum_exp(values):
    top = max(values)
    return top + math.log(sum(math.exp(v - top) for v in values))


def loop_sinkhorn(sim, gamma, iterations, r=None, c=None):
    """Eqs. 7 to 11 over Python floats, rows first: u = log r - lse_j(S + w), w = log c - lse_i(S +
    u)."""
    m, n = sim.shape
    S = [[x / gamma for x in row] for row in sim.tolist()]
    log_r, log_c = (
        [math.log(x) for x in (p.tolist() if p is not None else [1 / k] * k)]
        for p, k in ((r, m), (c, n))
    )
    w = [0.0] * n
    for _ in range(iterations):
        u = [log_r[i] - log_sum_exp([S[i][j] + w[j] for j in range(n)]) for i in range(m)]
        w = [log_c[j] - log_sum_exp([S[i][j] + u[i] for i in range(m)]) for j in range(n)]
    return tuple(
        torch.tensor([gamma * (x - log_sum_exp(v)) for x in v], dtype=torch.float64) for v in (u, w)
    )


@pytest.mark.parametrize("priors", [False, True], ids=["uniform", "priors"])
@pytest.mark.parametrize("shape", [(40, 17), (5, 60)], ids=str)
def test_biases_against_a_loop(shape, priors):
    sim, shares = unit(shape[0], 8, seed=1) @ unit(shape[1], 8, seed=2).T, (None, None)
    if priors:
        shares = [F.normalize(0.2 + unit(1, n, seed=n)[0].abs(), p=1, dim=0) for n in shape]
    for gamma, iterations in ((0.01, 4), (0.05, 1), (0.05, 100)):
        expected = loop_sinkhorn(sim, gamma, iterations, *shares)
        for dtype, tolerance in ((torch.float32, 3e-3), (torch.float64, 1e-9)):
            for bias, reference in zip(
                ncl.sinkhorn_biases(sim.to(dtype), gamma, iterations, *shares), expected
            ):
                assert bias.dtype == dtype
                assert ((bias.double() - reference) / gamma).abs().max() < tolerance


@pytest.mark.parametrize("iterations", [0, 1, 4])
@pytest.mark.parametrize("gamma", [0.01, 0.07])
def test_ncl_loss_against_a_loop(gamma, iterations):
    """Eqs. 4 and 12 with both biases in both directions; without iterations CLIP's loss."""
    text, video = pairs()
    sim, a, b = text @ video.T, torch.zeros(N), torch.zeros(N)
    if iterations:
        a, b = loop_sinkhorn(sim, gamma, iterations)
    s = ((a[:, None] + b + sim) / gamma).tolist()
    expected = {
        "L_t2v": sum(log_sum_exp(s[i]) - s[i][i] for i in range(N)) / N,
        "L_v2t": sum(log_sum_exp([row[i] for row in s]) - s[i][i] for i in range(N)) / N,
    }
    # embeddings are normalised inside
    terms = {}
    ncl.ncl_loss(3 * text, 0.1 * video, gamma, iterations, terms=terms)
    assert {k: v.item() for k, v in terms.items()} == pytest.approx(expected, rel=1e-9)
    loss = ncl.ncl_loss(text, video, torch.tensor(gamma), iterations, detach=False)
    assert loss.item() == pytest.approx(sum(expected.values()) / 2, rel=1e-5)


def test_detached_biases_have_the_full_gradient_at_convergence():
    leaves = [x.requires_grad_() for x in pairs(24, 16, noise=1.5)]
    for rounds, near in ((500, True), (4, False)):
        both = (
            torch.autograd.grad(ncl.ncl_loss(*leaves, 0.05, rounds, detach), leaves)
            for detach in (True, False)
        )
        for kept, free in zip(*both):
            apart = ((kept - free).norm() / free.norm()).item()
            assert apart < 1e-6 if near else apart > 0.01


@pytest.mark.parametrize("margin", [0.0, 0.2, 2.5])
def test_hardest_negative_loss_against_a_loop(margin):
    text, video = pairs(noise=1.5, hub=0)
    s, expected = (text @ video.T).tolist(), {"L_t2v": 0.0, "L_v2t": 0.0}
    for i in range(N):
        expected["L_t2v"] += max(0, margin - s[i][i] + max(s[i][j] for j in range(N) if j != i)) / N
        expected["L_v2t"] += max(0, margin - s[i][i] + max(s[j][i] for j in range(N) if j != i)) / N
    terms = {}
    loss = ncl.hardest_negative_loss(2 * text, video, margin, terms=terms)
    assert {k: v.item() for k, v in terms.items()} == pytest.approx(expected)
    assert min(expected.values()) > 0
    assert loss.item() == pytest.approx(sum(expected.values()))


def test_normalization_error():
    """Eq. 5: a fair item of n collects m / n of m queries; the error is relative to that."""
    # 4, 2 and 0 queries, 2 each were fair
    uneven = torch.tensor([[1.0, 0, 0]] * 4 + [[0, 1.0, 0]] * 2)
    assert common.normalization_error(uneven, 0.01) == pytest.approx(2 / 3)
    sim = torch.randn(5000, 3, generator=torch.Generator().manual_seed(0))  # in two parts
    expected = (1 - F.softmax(sim.double() / 0.5, 1).sum(0) * 3 / 5000).abs().mean().item()
    assert common.normalization_error(sim, 0.5) == pytest.approx(expected)


def test_queue_keeps_the_last_queries_oldest_first():
    """Fig. 5 and eval.py --queue-size take the last rows of what it gives for the latest queries.
    """

    def numbered(first, last):
        angle = torch.arange(first, last) / 10
        return torch.stack([angle.cos(), angle.sin()], 1)

    queue = ncl.QueryQueue(5, 2)
    assert queue.get().shape == (0, 2)
    # 2 and 3 do not divide 5; 12 is more than it holds
    for pushed, batch in ((2, 2), (4, 2), (6, 2), (8, 2), (11, 3), (12, 1), (24, 12), (26, 2)):
        queue.push(7 * numbered(pushed - batch, pushed).requires_grad_())  # any scale
        # what is there, no zeros
        assert torch.allclose(queue.get(), numbered(max(0, pushed - 5), pushed), atol=1e-6)
    queue.push(numbered(0, 2).bfloat16())
    assert queue.get().dtype == torch.float32 and not queue.get().requires_grad


# ---------------------------------------------------- test time -----------------------------------
def test_retrieval_biases_in_blocks_are_sinkhorn_s():
    """Blocks of 1,024 queries: the same biases as on the whole matrix, with the memory of a block.
    """
    items, queries = unit(50, D), unit(2500, D, seed=1)
    for gamma in (0.01, 0.1):
        expected = ncl.sinkhorn_biases(queries @ items.T, gamma)[1]
        assert torch.allclose(
            ncl.retrieval_biases(2 * items, 5 * queries, gamma), expected, atol=1e-9
        )


def test_the_queue_of_texts_serves_the_videos():
    """Text -> video needs biases of the videos, from queries that are texts: exchanged queues give
    other numbers."""
    (text, video), (texts, videos) = pairs(20), pairs(90, seed=7)
    pieces = EvaluationPieces(
        image=video,
        text=text,
        owner=np.arange(20),
        data=SimpleNamespace(grouped=False),
        positives=torch.arange(20)[:, None],
        positives_of_image=torch.arange(20)[:, None],
    )
    results, biases = ncl.normalized_retrieval(pieces, 0.05, 4, texts, videos)
    assert list(results) == ["none", "queue", "oracle"] and not biases["none"][0].any()
    for mode, t, v in (("queue", texts, videos), ("oracle", text, video)):
        assert torch.allclose(biases[mode][0], loop_sinkhorn(t @ video.T, 0.05, 4)[1], atol=1e-9)
        assert torch.allclose(biases[mode][1], loop_sinkhorn(v @ text.T, 0.05, 4)[1], atol=1e-9)
        for way, sim in {
            "text_to_image": text @ video.T + biases[mode][0],
            "image_to_text": video @ text.T + biases[mode][1],
        }.items():
            expected = (1 - F.softmax(sim / 0.05, 1).sum(0)).abs().mean().item()
            assert results[mode]["error"][way] == pytest.approx(expected)


# ---------------------------------------------------- runs ----------------------------------------
def test_normalize_chooses_the_reported_numbers_and_eval_repeats_them(tmp_path):
    """--normalize stands in front; the others beside it, and the training is the same."""
    base, summaries = [*SMALL, "--iterations", "3"], {}
    for mode, flags in (
        ("queue", ["--eval-every", 2]),
        ("oracle", ["--queue-size", 5, "--normalize", "oracle"]),
    ):
        summaries[mode] = run_script(ncl, tmp_path / mode, *flags, base=base)
        for split in ("val", "test"):
            found = summaries[mode][split]["moving-emoji"]
            of_all = found["normalize"]
            assert list(of_all) == ["none", "queue", "oracle"] and of_all["queue"] != of_all["none"]
            assert found["normalized_by"] == mode
            assert all(
                found[k] == of_all[mode][k] for k in ("text_to_image", "image_to_text", "R-Mean")
            )
    log = rows(tmp_path / "queue")
    # step 0: nothing is in the queue
    assert list(log[0]["eval"]["moving-emoji"]["normalize"]) == ["none", "oracle"]
    assert all(r["error_normalized"] < r["error"] and r["tau"] == 0.1 for r in log if "loss" in r)

    # eval.py reads the queues of the run, of which the latest 5 are kept
    words = "--normalize queue --tasks retrieval".split()
    result = evaluated(tmp_path / "oracle", *words)["moving-emoji"]["metrics"]
    assert result["normalized_by"] == "queue"
    of_few = flatten(summaries["oracle"]["test"]["moving-emoji"]["normalize"])
    assert flatten(result["normalize"]) == pytest.approx(of_few, rel=1e-4, abs=1e-4)


def test_the_loss_is_that_of_its_terms_and_the_baseline_has_no_biases(tmp_path):
    """InfoNCE reports the retrieval by cosine; its errors are logged as those of NCL."""
    for row in few_steps(ncl, tmp_path / "ncl", base=SMALL):
        assert row["loss"] == pytest.approx((row["L_t2v"] + row["L_v2t"]) / 2, rel=1e-6)
    summary = run_script(ncl, tmp_path / "baseline", "--baseline", base=SMALL)
    metrics = summary["test"]["moving-emoji"]
    assert summary["method"] == "infonce" and metrics["normalized_by"] == "none"
    assert metrics["text_to_image"] == metrics["normalize"]["none"]["text_to_image"]
    assert all("error_normalized" in row for row in steps(tmp_path / "baseline"))


def test_the_baseline_beside_another_loss_is_refused(capsys):
    words = ["--baseline", "--loss", "ncl"]
    assert "--loss ncl: --baseline is --loss infonce" in refused(ncl.parse_args, words, capsys)


def test_the_queues_are_the_training_batches(tmp_path):
    """At a rate of 0 they can be computed again: row k is the k-th training example, and none of
    val or test."""
    flags = "--lr 0 --lr-end 0 --crop-min 1 --jitter 0 --eval-every 1".split()
    run_script(ncl, tmp_path / "still", *flags, base=SMALL)
    queues = load_file(tmp_path / "still" / "queues.safetensors")
    model, tokenizer, transform = common.load_model(tmp_path / "still")

    def encoded(split):
        data = common.load_data("moving-emoji", split, frames=2, image_size=16, clips=[64, 16, 16])
        index, video, _, _, _ = evaluation.embed.encode_images(model, data, transform, CPU)
        captions = [[data.captions(i)[k] for i in index] for k in range(3)]
        texts = [evaluation.embed.encode_texts(model, tokenizer, c, CPU) for c in captions]
        return common.normalize(video), common.normalize(torch.stack(texts))  # (M, D), (3, M, D)

    order = torch.from_numpy(
        np.concatenate([batch for _, batch in epoch_batches(64, 16, 42, 0, 4)])
    )
    video, text = encoded("train")
    assert torch.allclose(queues["videos"], video[order], atol=1e-4)
    # one of its three captions
    assert ((queues["texts"] - text[:, order]).abs().amax(2).amin(0) < 1e-4).all()
    for split in ("val", "test"):
        video, text = encoded(split)
        assert torch.cdist(queues["videos"], video).min() > 1e-3
        assert torch.cdist(queues["texts"], text.flatten(0, 1)).min() > 1e-3


def test_the_queues_are_those_of_the_weights_that_are_evaluated(tmp_path):
    """At a rate of 0 all evaluations tie; --eval-epoch best takes the first, after two steps."""
    flags = "--lr 0 --lr-end 0 --normalize none --eval-every 2 --eval-epoch best".split()
    run_script(ncl, tmp_path / "best", *flags, base=SMALL)
    assert len(load_file(tmp_path / "best" / "queues.safetensors")["texts"]) == 2 * 16


def test_clip4clip_freezes_embeddings_and_first_norms(tiny, tmp_path):
    """As its scripts do (--freeze_layer_num 0): these stay as they were, all else learns; others
    are refused."""
    name, model = tiny("clip")
    words = (
        "--pretrained --image-size 32 --text-length 12 --embed-dim 16 --max-steps 2 --lr 0.01 "
        "--weight-decay 0.2 --freeze clip4clip"
    )
    clip = ["--image-encoder", name, "--text-encoder", name, *words.split()]
    few_steps(ncl, tmp_path / "r", *clip, base=SMALL)
    found, still = tensors_of(tmp_path / "r", 2), set()
    for key, value in model.state_dict().items():
        half, _, rest = key.partition("_model.")
        after = found.get(f"model/{half}.body.{rest}", torch.tensor(0))
        if value.is_floating_point() and torch.equal(after, value):
            still.add(rest)
    assert still == {
        "embeddings.class_embedding",
        "embeddings.patch_embedding.weight",
        "pre_layrnorm.weight",
        "embeddings.position_embedding.weight",
        "embeddings.token_embedding.weight",
        "pre_layrnorm.bias",
    }
    with pytest.raises(UserError, match="--freeze clip4clip: both encoders have to be CLIP's"):
        few_steps(ncl, tmp_path / "small", "--freeze", "clip4clip", base=SMALL)


# ---------------------------------------------------- pictures ------------------------------------
def test_the_figures_have_a_fork_s_biases(tmp_path):
    """R@1 by the size of the queue (Fig. 5): the fork's biases put the first item in front of all
    others."""
    own = fork(
        ncl,
        tmp_path,
        "return gamma * log_beta.log_softmax(0)\n",
        "return 9.0 * (torch.arange(len(items)) == 0)\n",
    )
    summary = run_script(own, tmp_path / "fork", base=SMALL)
    reported = summary["test"]["moving-emoji"]["normalize"]["queue"]
    (saved,) = read_pieces(tmp_path / "fork" / "test.safetensors").values()
    assert list(saved.recall_by_queue_size) == ["16", "32", "64"]
    for recalls in saved.recall_by_queue_size.values():
        for way, recall in recalls.items():
            assert recall == reported[way]["R@1"]
        # the first text is right for one of 16
        assert recalls["image_to_text"] == pytest.approx(100 / 16)
    image_bias, text_bias = saved.biases["queue"]
    assert image_bias.sum() == text_bias.sum() == 9


def test_pictures_are_drawn_from_files_again(tmp_path):
    """Of two runs the same queries and planes; a set of less than 20 captions has no pictures."""
    runs = [tmp_path / "infonce", tmp_path / "ncl"]
    for run, flags in zip(runs, (["--baseline"], [])):
        run_script(ncl, run, "--clips", 64, 24, 24, *flags, base=SMALL)
    draw("ncl", runs[1])
    names = {path.stem for path in runs[1].glob("*.png")}
    assert {"curves", "normalization", "retrieval", "modalities"} <= names
    for name, numbers in (("errors", 6), ("queries", 2), ("modalities", 2)):
        lines = figures_of_runs()[name](runs, tmp_path / f"{name}.png")
        assert len(lines) >= numbers and (tmp_path / f"{name}.png").exists()


def test_what_figures_3_and_7_count():
    """Queries of items 0 and 1 find 0, those of 2 find 2 and 0: one right item will do. One caption
    of each clip."""
    sim = F.one_hot(torch.tensor([0, 0, 0, 0, 2, 0]), 3).float()
    missed, wrong = figures.ncl.mistakes(sim, torch.tensor([[0, 1]] * 4 + [[2, -1]] * 2))
    assert missed.tolist() == [0, 0, 0.5] and wrong.tolist() == [0.5, 0, 0]
    pieces = SavedPieces(
        "test", "video", 600, keys=[],
        owner=torch.arange(600).repeat_interleave(3),
        text=torch.arange(1800.0)[:, None],
        image=torch.arange(600.0)[:, None],
    )
    text, image = figures.ncl.first_captions(pieces)
    assert text[:, 0].tolist() == [3.0 * k for k in range(500)]
    assert image[:, 0].tolist() == [float(k) for k in range(500)]
