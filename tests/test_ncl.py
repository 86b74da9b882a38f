"""NCL: Sinkhorn biases and losses against loops, the queue, normalisation at test time. test_ssb.py
has SSB."""

import math
from types import SimpleNamespace

import common
import contrastive.figures.ncl  # noqa: F401  (figures.ncl)
from contrastive import evaluation, figures
from contrastive.core.processes import UserError
from contrastive.data.batches import epoch_batches
from contrastive.evaluation.pieces import EvaluationPieces
from contrastive.evaluation.saved_pieces import read_pieces

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import ncl
from helpers import CPU, few_steps, fork, run_script, steps, tensors_of, unit

N, D = 12, 6
SMALL = (
    "--cpu --workers 0 --clips 64 16 16 --frames 2 --image-size 16 --batch-size 16 --max-steps 4 "
    "--log-every 1 --eval-every 0").split()


def pairs(n=N, d=D, noise=0.7, hub=0.5, seed=0):
    """Texts and videos near them, (n, d) float64 each, which lean by other lengths to where all
    texts lean: hub."""
    text, other, way = unit(n, d, seed=seed), unit(n, d, seed=seed + 1), unit(1, d, seed=seed + 2)
    generator = torch.Generator().manual_seed(seed)
    lean = 2 * hub * torch.rand(n, 1, dtype=torch.float64, generator=generator)
    video = text + noise * other + lean * way
    return F.normalize(text + hub * way, dim=1), F.normalize(video, dim=1)


# ---------------------------------------------------- Sinkhorn and the losses ---------------------
def log_sum_exp(values):
    top = max(values)
    return top + math.log(sum(math.exp(v - top) for v in values))


def loop_sinkhorn(sim, gamma, iterations, row_prior=None, column_prior=None):
    """Eqs. 7 to 11 over Python floats, rows first: u = log r - lse_j(S + w), w = log c - lse_i(S +
    u)."""
    S = (sim / gamma).tolist()
    m, n = sim.shape
    if row_prior is None:
        row_prior, column_prior = torch.full((m,), 1 / m), torch.full((n,), 1 / n)
    log_r, log_c = row_prior.double().log().tolist(), column_prior.double().log().tolist()
    u, w = [0.0] * m, [0.0] * n
    for _ in range(iterations):
        for i in range(m):
            u[i] = log_r[i] - log_sum_exp([S[i][j] + w[j] for j in range(n)])
        for j in range(n):
            w[j] = log_c[j] - log_sum_exp([S[i][j] + u[i] for i in range(m)])
    biases = []
    for logs in (u, w):
        total = log_sum_exp(logs)
        biases.append(torch.tensor([gamma * (x - total) for x in logs], dtype=torch.float64))
    return biases


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-3), (torch.float64, 1e-6)])
@pytest.mark.parametrize("gamma, iterations", [(0.01, 4), (0.05, 1), (0.05, 100)])
@pytest.mark.parametrize("has_priors", [False, True])
def test_biases_against_a_loop(has_priors, gamma, iterations, dtype, tolerance):
    sim, priors = unit(40, 8, seed=1) @ unit(17, 8, seed=2).T, []
    if has_priors:
        for n in sim.shape:
            priors.append(F.normalize(0.2 + unit(1, n, seed=n)[0].abs(), p=1, dim=0))
    expected = loop_sinkhorn(sim, gamma, iterations, *priors)
    biases = ncl.sinkhorn_biases(sim.to(dtype), gamma, iterations, *priors)
    for bias, bias_of_loop in zip(biases, expected):
        assert bias.dtype == dtype
        assert ((bias - bias_of_loop) / gamma).abs().max() < tolerance


def loop_ncl(text, video, gamma, iterations):
    """Eqs. 4 and 12: L_t2v and L_v2t, with both biases in both directions."""
    sim = text @ video.T
    if iterations:
        a, b = loop_sinkhorn(sim, gamma, iterations)
        sim = a[:, None] + b + sim
    s, losses = (sim / gamma).tolist(), [0.0, 0.0]
    for i in range(N):
        losses[0] += (log_sum_exp(s[i]) - s[i][i]) / N
        losses[1] += (log_sum_exp([row[i] for row in s]) - s[i][i]) / N
    return losses


@pytest.mark.parametrize("iterations", [0, 1, 4])
@pytest.mark.parametrize("gamma", [0.01, 0.07])
def test_ncl_loss_against_a_loop(gamma, iterations):
    """Embeddings are normalised inside; without iterations CLIP's loss."""
    text, video = pairs()
    expected, terms = loop_ncl(text, video, gamma, iterations), {}
    loss = ncl.ncl_loss(3 * text, 0.1 * video, gamma, iterations, terms=terms)
    assert [terms[name].item() for name in ("L_t2v", "L_v2t")] == pytest.approx(expected, rel=1e-6)
    assert loss.item() == pytest.approx(sum(expected) / 2, rel=1e-6)


@pytest.mark.parametrize("iterations, is_converged", [(500, True), (4, False)])
def test_detached_biases_have_the_full_gradient_at_convergence(iterations, is_converged):
    text, video = (x.requires_grad_() for x in pairs(24, 16, noise=1.5))
    gradients = []
    for detach in (True, False):
        loss = ncl.ncl_loss(text, video, 0.05, iterations, detach)
        gradients.append(torch.cat(torch.autograd.grad(loss, (text, video))))
    detached, full = gradients
    error = ((detached - full).norm() / full.norm()).item()
    if is_converged:
        assert error < 1e-6
    else:
        assert error > 0.01


@pytest.mark.parametrize("margin", [0.0, 0.2, 2.5])
def test_hardest_negative_loss_against_a_loop(margin):
    text, video = pairs(noise=1.5, hub=0)
    s, expected, terms = (text @ video.T).tolist(), [0.0, 0.0], {}
    for i in range(N):
        others = [j for j in range(N) if j != i]
        expected[0] += max(0, margin - s[i][i] + max(s[i][j] for j in others)) / N
        expected[1] += max(0, margin - s[i][i] + max(s[j][i] for j in others)) / N
    loss = ncl.hardest_negative_loss(2 * text, video, margin, terms=terms)
    assert [terms[name].item() for name in ("L_t2v", "L_v2t")] == pytest.approx(expected)
    assert min(expected) > 0
    assert loss.item() == pytest.approx(sum(expected))


def test_normalization_error_by_hand():
    """Eq. 5: items get 4, 2 and 0 of 6 queries, 2 each were fair."""
    sim = torch.tensor([[1.0, 0, 0]] * 4 + [[0, 1.0, 0]] * 2)
    assert common.normalization_error(sim, 0.01) == pytest.approx(2 / 3)


def test_normalization_error_of_many_queries():
    """In two parts."""
    sim = torch.randn(5000, 3, generator=torch.Generator().manual_seed(0))
    expected = (1 - F.softmax(sim.double() / 0.5, 1).sum(0) * 3 / 5000).abs().mean().item()
    assert common.normalization_error(sim, 0.5) == pytest.approx(expected)


def test_queue_keeps_the_last_queries_oldest_first():
    """Fig. 5 and eval.py --queue-size take the last rows of what it gives."""
    queries, queue, num_pushed = unit(26, 2).float(), ncl.QueryQueue(5, 2), 0
    assert queue.get().shape == (0, 2)
    # 2 and 3 do not divide 5; 12 is more than it holds
    for batch in (2, 2, 2, 2, 3, 1, 12, 2):
        queue.push(7 * queries[num_pushed : num_pushed + batch].requires_grad_())
        num_pushed += batch
        last = queries[max(0, num_pushed - 5) : num_pushed]
        assert torch.allclose(queue.get(), last, atol=1e-6)
    assert not queue.get().requires_grad


# ---------------------------------------------------- test time -----------------------------------
def test_biases_of_items_of_any_length_are_those_of_the_cosines():
    items, queries = unit(5, D), unit(9, D, seed=1)
    _, expected = loop_sinkhorn(queries @ items.T, 0.1, 4)
    assert torch.allclose(ncl.retrieval_biases(2 * items, 5 * queries, 0.1), expected, atol=1e-9)


@pytest.mark.parametrize("mode", ["queue", "oracle"])
def test_the_queue_of_texts_serves_the_videos(mode):
    """Text -> video needs biases of the videos, from queries that are texts: exchanged queues give
    other numbers."""
    (text, video), queues, one_each = pairs(20), pairs(90, seed=7), torch.arange(20)[:, None]
    pieces = EvaluationPieces(
        image=video, text=text, owner=np.arange(20), data=SimpleNamespace(grouped=False),
        positives=one_each, positives_of_image=one_each)
    results, biases = ncl.normalized_retrieval(pieces, 0.05, 4, *queues)
    texts, videos = {"queue": queues, "oracle": (text, video)}[mode]
    ways = {"text_to_image": (texts, text, video), "image_to_text": (videos, video, text)}
    for bias, (way, (queries, query, gallery)) in zip(biases[mode], ways.items()):
        _, expected = loop_sinkhorn(queries @ gallery.T, 0.05, 4)
        assert torch.allclose(bias, expected, atol=1e-9)
        error = common.normalization_error(query @ gallery.T + expected, 0.05)
        assert results[mode]["error"][way] == pytest.approx(error)


# ---------------------------------------------------- runs ----------------------------------------
@pytest.fixture(scope="module", params=["queue", "oracle"])
def normalized(request, tmp_path_factory):
    """(the mode, a run's folder, its summary); the queue holds 5."""
    mode, folder = request.param, tmp_path_factory.mktemp("runs") / "run"
    flags = ["--eval-every", 2, "--normalize", mode, "--queue-size", 5]
    return mode, folder, run_script(ncl, folder, *flags, base=SMALL)


@pytest.mark.parametrize("split", ["val", "test"])
def test_normalize_chooses_the_numbers_in_front(normalized, split):
    mode, _, summary = normalized
    result = summary[split]["moving-emoji"]
    of_mode = result["normalize"][mode]
    assert [*result["normalize"]] == ["none", "queue", "oracle"]
    assert result["normalized_by"] == mode
    assert result["text_to_image"] == of_mode["text_to_image"] != result["normalize"]["none"]
    assert result["R-Mean"] == of_mode["R-Mean"]


def test_the_loss_is_the_mean_of_its_terms(normalized):
    _, folder, _ = normalized
    for row in steps(folder):
        assert row["loss"] == pytest.approx((row["L_t2v"] + row["L_v2t"]) / 2, rel=1e-6)
        assert row["error_normalized"] < row["error"]


def test_the_baseline_has_no_biases(tmp_path):
    summary = run_script(ncl, tmp_path / "baseline", "--baseline", base=SMALL)
    metrics = summary["test"]["moving-emoji"]
    assert summary["method"] == "infonce"
    assert metrics["normalized_by"] == "none"
    assert metrics["text_to_image"] == metrics["normalize"]["none"]["text_to_image"]


@pytest.fixture(scope="module")
def still(tmp_path_factory):
    """A run at a rate of 0, so that its queues can be computed again, and these."""
    folder = tmp_path_factory.mktemp("still") / "run"
    flags = "--lr 0 --lr-end 0 --crop-min 1 --jitter 0".split()
    run_script(ncl, folder, *flags, base=SMALL)
    return folder, load_file(folder / "queues.safetensors")


def encoded(folder, split):
    """Videos (M, D) and texts (3, M, D) of a split, by the model of a run."""
    model, tokenizer, transform = common.load_model(folder)
    data = common.load_data("moving-emoji", split, frames=2, image_size=16, clips=[64, 16, 16])
    index, video, _, _, _ = evaluation.embed.encode_images(model, data, transform, CPU)
    texts = []
    for k in range(3):
        captions = [data.captions(i)[k] for i in index]
        texts.append(evaluation.embed.encode_texts(model, tokenizer, captions, CPU))
    return common.normalize(video), common.normalize(torch.stack(texts))


def test_queues_are_the_training_batches_in_their_order(still):
    folder, queues = still
    order = np.concatenate([batch for _, batch in epoch_batches(64, 16, 42, 0, 4)])
    video, text = encoded(folder, "train")
    assert torch.allclose(queues["videos"], video[order], atol=1e-4)
    # one of three captions
    differences = (queues["texts"] - text[:, order]).abs().amax(2)
    assert (differences.amin(0) < 1e-4).all()


@pytest.mark.parametrize("split", ["val", "test"])
def test_no_held_out_row_is_in_the_queues(still, split):
    folder, queues = still
    video, text = encoded(folder, split)
    assert torch.cdist(queues["videos"], video).min() > 1e-3
    assert torch.cdist(queues["texts"], text.flatten(0, 1)).min() > 1e-3


def test_queues_are_those_of_the_weights_that_are_evaluated(tmp_path):
    """At a rate of 0 all evaluations tie; --eval-epoch best takes the first, after two steps."""
    flags = "--lr 0 --lr-end 0 --normalize none --eval-every 2 --eval-epoch best".split()
    run_script(ncl, tmp_path / "best", *flags, base=SMALL)
    assert len(load_file(tmp_path / "best" / "queues.safetensors")["texts"]) == 2 * 16


CLIP4CLIP_FREEZES = {
    "embeddings.class_embedding", "embeddings.patch_embedding.weight", "pre_layrnorm.weight",
    "embeddings.position_embedding.weight", "embeddings.token_embedding.weight",
    "pre_layrnorm.bias"}


def test_clip4clip_freezes_embeddings_and_first_norms(tiny, tmp_path):
    """As its scripts do (--freeze_layer_num 0): these stay as they were, all else learns."""
    name, model = tiny("clip")
    words = (
        "--pretrained --image-size 32 --text-length 12 --embed-dim 16 --max-steps 2 --lr 0.01 "
        "--weight-decay 0.2 --freeze clip4clip").split()
    encoders = ["--image-encoder", name, "--text-encoder", name]
    few_steps(ncl, tmp_path / "r", *encoders, *words, base=SMALL)
    after, unchanged = tensors_of(tmp_path / "r", 2), set()
    for key, before in model.state_dict().items():
        half, _, rest = key.partition("_model.")
        place = f"model/{half}.body.{rest}"
        if before.is_floating_point() and place in after and torch.equal(after[place], before):
            unchanged.add(rest)
    assert unchanged == CLIP4CLIP_FREEZES


def test_clip4clip_freezes_no_other_encoders(tmp_path):
    with pytest.raises(UserError, match="--freeze clip4clip: both encoders have to be CLIP's"):
        few_steps(ncl, tmp_path / "small", "--freeze", "clip4clip", base=SMALL)


# ---------------------------------------------------- pictures ------------------------------------
def test_figures_have_a_fork_s_biases(tmp_path):
    """R@1 by the size of the queue (Fig. 5): the fork's biases put the first item in front of all
    others."""
    biases = "return b\n"
    own = fork(ncl, tmp_path, biases, "return 9.0 * (torch.arange(len(items)) == 0)\n")
    run_script(own, tmp_path / "fork", base=SMALL)
    (saved,) = read_pieces(tmp_path / "fork" / "test.safetensors").values()
    assert [*saved.recall_by_queue_size] == ["16", "32", "64"]
    for recalls in saved.recall_by_queue_size.values():
        # the first text is right for one of 16
        assert recalls["image_to_text"] == pytest.approx(100 / 16)
    image_bias, text_bias = saved.biases["queue"]
    assert image_bias.sum() == text_bias.sum() == 9


def test_mistakes_are_counted_by_item():
    """Figs. 3 and 7: queries of items 0 and 1 find 0, those of 2 find 2 and 0; one right item will
    do."""
    sim = F.one_hot(torch.tensor([0, 0, 0, 0, 2, 0]), 3).float()
    missed, wrong = figures.ncl.mistakes(sim, torch.tensor([[0, 1]] * 4 + [[2, -1]] * 2))
    assert missed.tolist() == [0, 0, 0.5]
    assert wrong.tolist() == [0.5, 0, 0]
