"""NCL: Sinkhorn biases and losses against loops, the queue, normalisation at test time. test_ssb.py
has SSB."""

from types import SimpleNamespace

import common
import contrastive.figures.ncl  # noqa: F401  (figures.ncl)
from contrastive import figures
from contrastive.core.processes import UserError
from contrastive.data.batches import epoch_batches
from contrastive.evaluation import embed
from contrastive.evaluation.pieces import EvaluationPieces
from contrastive.evaluation.saved_pieces import read_pieces

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import ncl
from helpers import CPU, assert_close, few_steps, fork, run_script, tensors_of, unit

N, D = 12, 6
SMALL = (
    "--cpu --workers 0 --clips 64 16 16 --frames 2 --image-size 16 --batch-size 16 --max-steps 4 "
    "--log-every 1 --eval-every 0").split()


def pairs(n=N, d=D, noise=0.7, seed=0):
    """Texts and videos near them, (n, d) float64 each."""
    text = unit(n, d, seed=seed)
    video = text + noise * unit(n, d, seed=seed + 1)
    return text, F.normalize(video, dim=1)


# ---------------------------------------------------- Sinkhorn and the losses ---------------------
def loop_sinkhorn(sim, gamma, iterations, row_prior, column_prior):
    """Eqs. 7 to 11, rows first."""
    K = (sim.double() / gamma).exp()
    m, n = K.shape
    alpha = torch.ones(m).double()
    beta = torch.ones(n).double()
    for _ in range(iterations):
        for i, row in enumerate(K):
            alpha[i] = row_prior[i] / (row @ beta)
        for j, column in enumerate(K.T):
            beta[j] = column_prior[j] / (column @ alpha)
    a = gamma * (alpha / alpha.sum()).log()
    b = gamma * (beta / beta.sum()).log()
    return a, b


def loop_biases(sim, gamma, iterations=4):
    """loop_sinkhorn where all rows, and all columns, have the same share."""
    m, n = sim.shape
    rows, columns = torch.ones(m) / m, torch.ones(n) / n
    return loop_sinkhorn(sim, gamma, iterations, rows, columns)


def random_prior(n):
    shares = 0.2 + unit(n, seed=n).abs()
    return shares / shares.sum()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-3), (torch.float64, 1e-6)])
@pytest.mark.parametrize("gamma, iterations", [(0.01, 4), (0.05, 1), (0.05, 100)])
def test_biases_against_a_loop(gamma, iterations, dtype, tolerance):
    sim = unit(40, 8, seed=1) @ unit(17, 8, seed=2).T
    priors = random_prior(40), random_prior(17)
    expected = loop_sinkhorn(sim, gamma, iterations, *priors)
    biases = ncl.sinkhorn_biases(sim.to(dtype), gamma, iterations, *priors)
    for bias, bias_of_loop in zip(biases, expected):
        assert bias.dtype == dtype
        assert_close(bias.double(), bias_of_loop, tolerance * gamma)


def loop_cross_entropy(logits):
    """Mean over rows; the pair of row i is in column i."""
    total = 0.0
    for i, row in enumerate(logits):
        total += row.exp().sum().log() - row[i]
    return total / len(logits)


@pytest.mark.parametrize("iterations", [0, 1, 4])
@pytest.mark.parametrize("gamma", [0.01, 0.07])
def test_ncl_loss_against_a_loop(gamma, iterations):
    """Eqs. 4 and 12, both biases in both directions; without iterations CLIP's loss. Embeddings are
    normalised inside."""
    text, video = pairs()
    sim = text @ video.T
    if iterations:
        a, b = loop_biases(sim, gamma, iterations)
        sim = a[:, None] + b + sim
    L_t2v = loop_cross_entropy(sim / gamma)
    L_v2t = loop_cross_entropy(sim.T / gamma)
    terms = {}
    loss = ncl.ncl_loss(3 * text, 0.1 * video, gamma, iterations, terms=terms)
    assert_close(terms, {"L_t2v": L_t2v, "L_v2t": L_v2t}, 1e-6)
    assert_close(loss, (L_t2v + L_v2t) / 2, 1e-6)


@pytest.mark.parametrize("iterations, is_converged", [(500, True), (4, False)])
def test_detached_biases_have_the_full_gradient_at_convergence(iterations, is_converged):
    text, video = (x.requires_grad_() for x in pairs(24, 16, noise=1.5))
    gradients = []
    for detach in (True, False):
        loss = ncl.ncl_loss(text, video, 0.1, iterations, detach)
        gradients.append(torch.cat(torch.autograd.grad(loss, (text, video))))
    detached, full = gradients
    error = (detached - full).norm() / full.norm()
    if is_converged:
        assert error < 1e-6
    else:
        assert error > 0.01


def loop_hardest(sim, margin):
    """VSE++, the mean over rows."""
    total = 0.0
    for i, s in enumerate(sim):
        hardest = max(s[j] for j in range(N) if j != i)
        total += (margin - s[i] + hardest).clamp(min=0)
    return total / N


@pytest.mark.parametrize("margin", [0.0, 0.2, 2.5])
def test_hardest_negative_loss_against_a_loop(margin):
    text, video = pairs(noise=1.5)
    sim = text @ video.T
    L_t2v = loop_hardest(sim, margin)
    L_v2t = loop_hardest(sim.T, margin)
    terms = {}
    loss = ncl.hardest_negative_loss(2 * text, video, margin, terms=terms)
    assert L_t2v > 0 and L_v2t > 0
    assert_close(terms, {"L_t2v": L_t2v, "L_v2t": L_v2t})
    assert_close(loss, L_t2v + L_v2t)


def test_normalization_error_by_hand():
    """Eq. 5: items get 4, 2 and 0 of 6 queries, 2 each were fair; 5,400 queries are in two parts.
    """
    items = torch.tensor([0, 0, 0, 0, 1, 1]).repeat(900)
    sim = F.one_hot(items, 3).float()
    assert common.normalization_error(sim, 0.01) == pytest.approx(2 / 3)


def test_queue_keeps_the_last_queries_oldest_first():
    """Fig. 5 and eval.py --queue-size take the last rows of what it gives."""
    queries = unit(26, 2).float()
    queue = ncl.QueryQueue(5, 2)
    num_pushed = 0
    assert queue.get().shape == (0, 2)
    # 2 and 3 do not divide 5; 12 is more than it holds
    for batch in (2, 2, 2, 2, 3, 1, 12, 2):
        new_queries = queries[num_pushed : num_pushed + batch]
        queue.push(7 * new_queries.requires_grad_())
        num_pushed += batch
        last = queries[max(0, num_pushed - 5) : num_pushed]
        assert_close(queue.get(), last, 1e-6)
    assert not queue.get().requires_grad


# ---------------------------------------------------- test time -----------------------------------
def test_biases_of_items_of_any_length_are_those_of_the_cosines():
    items = unit(5, D)
    queries = unit(9, D, seed=1)
    _, expected = loop_biases(queries @ items.T, 0.1)
    biases = ncl.retrieval_biases(2 * items, 5 * queries, 0.1)
    assert_close(biases, expected, 1e-7)


def test_the_queue_of_texts_serves_the_videos():
    """Text -> video needs biases of the videos, from queries that are texts: exchanged queues give
    other numbers."""
    text, video = pairs(20)
    texts, videos = pairs(90, seed=7)
    one_each = torch.arange(20)[:, None]
    pieces = EvaluationPieces(
        image=video, text=text, owner=np.arange(20), data=SimpleNamespace(grouped=False),
        positives=one_each, positives_of_image=one_each)
    results, biases = ncl.normalized_retrieval(pieces, 0.05, 4, texts, videos)
    queries_of = {"queue": (texts, videos), "oracle": (text, video)}
    for mode, (text_queries, video_queries) in queries_of.items():
        _, video_bias = loop_biases(text_queries @ video.T, 0.05)
        _, text_bias = loop_biases(video_queries @ text.T, 0.05)
        assert_close(biases[mode], (video_bias, text_bias))
        errors = results[mode]["error"]
        t2v_error = common.normalization_error(text @ video.T + video_bias, 0.05)
        v2t_error = common.normalization_error(video @ text.T + text_bias, 0.05)
        assert errors["text_to_image"] == pytest.approx(t2v_error)
        assert errors["image_to_text"] == pytest.approx(v2t_error)


# ---------------------------------------------------- runs ----------------------------------------
@pytest.mark.parametrize("mode", ["queue", "oracle", "none"])
def test_normalize_chooses_the_numbers_in_front(mode, tmp_path):
    flags = ["--normalize", mode, "--queue-size", 5]
    summary = run_script(ncl, tmp_path / "run", *flags, base=SMALL)
    for split in ("val", "test"):
        result = summary[split]["moving-emoji"]
        of_modes = result["normalize"]
        assert [*of_modes] == ["none", "queue", "oracle"]
        assert result["normalized_by"] == mode
        assert result["text_to_image"] == of_modes[mode]["text_to_image"]
        assert result["R-Mean"] == of_modes[mode]["R-Mean"]
        assert of_modes["none"]["text_to_image"] != of_modes["queue"]["text_to_image"]
        assert of_modes["none"]["text_to_image"] != of_modes["oracle"]["text_to_image"]


def test_the_biases_of_a_batch_lower_its_error(tmp_path):
    for row in few_steps(ncl, tmp_path / "run", base=SMALL):
        assert row["error_normalized"] < row["error"]


def encoded_training_set(folder):
    """Videos (M, D) and texts (3, M, D) of the training split, by the model of a run."""
    model, tokenizer, transform = common.load_model(folder)
    data = common.load_data("moving-emoji", "train", frames=2, image_size=16, clips=[64, 16, 16])
    images = embed.encode_images(model, data, transform, CPU)
    texts = []
    for k in range(3):
        captions = [data.captions(i)[k] for i in images.index]
        texts.append(embed.encode_texts(model, tokenizer, captions, CPU))
    return common.normalize(images.image), common.normalize(torch.stack(texts))


def test_queues_are_the_training_batches_in_their_order(tmp_path):
    """At a rate of 0, so that the model at the end gives them again."""
    flags = "--lr 0 --lr-end 0 --crop-min 1 --jitter 0".split()
    run_script(ncl, tmp_path / "run", *flags, base=SMALL)
    queues = load_file(tmp_path / "run" / "queues.safetensors")
    order = np.concatenate([batch for _, batch in epoch_batches(64, 16, 42, 0, 4)])
    video, text = encoded_training_set(tmp_path / "run")
    assert torch.allclose(queues["videos"], video[order], atol=1e-4)
    # one of three captions
    differences = (queues["texts"] - text[:, order]).abs().amax(2)
    assert (differences.amin(0) < 1e-4).all()


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
        f"--pretrained --image-encoder {name} --text-encoder {name} --image-size 32 --embed-dim 16 "
        "--text-length 12 --max-steps 2 --lr 0.01 --weight-decay 0.2 --freeze clip4clip").split()
    few_steps(ncl, tmp_path / "run", *words, base=SMALL)
    after, unchanged = tensors_of(tmp_path / "run", 2), set()
    for key, before in model.state_dict().items():
        half, _, rest = key.partition("_model.")
        trained = after.get(f"model/{half}.body.{rest}")
        if trained is not None and before.is_floating_point() and torch.equal(trained, before):
            unchanged.add(rest)
    assert unchanged == CLIP4CLIP_FREEZES


def test_clip4clip_freezes_no_other_encoders(tmp_path):
    with pytest.raises(UserError, match="--freeze clip4clip: both encoders have to be CLIP's"):
        few_steps(ncl, tmp_path / "run", "--freeze", "clip4clip", base=SMALL)


# ---------------------------------------------------- pictures ------------------------------------
def test_figures_have_a_fork_s_biases(tmp_path):
    """R@1 by the size of the queue (Fig. 5): the fork's biases put the first item in front of all
    others."""
    biases = "return b\n"
    own = fork(ncl, tmp_path, biases, "return 9.0 * (torch.arange(len(items)) == 0)\n")
    run_script(own, tmp_path / "run", base=SMALL)
    (saved,) = read_pieces(tmp_path / "run" / "test.safetensors").values()
    assert [*saved.recall_by_queue_size] == ["16", "32", "64"]
    for recalls in saved.recall_by_queue_size.values():
        # the first text is right for one of 16
        assert recalls["image_to_text"] == pytest.approx(100 / 16)
    image_bias, text_bias = saved.biases["queue"]
    assert image_bias.sum() == text_bias.sum() == 9


def test_mistakes_are_counted_by_item():
    """Figs. 3 and 7: queries of items 0 and 1 find 0, those of 2 find 2 and 0, that of 3 finds 0;
    one right item will do."""
    sim = F.one_hot(torch.tensor([0, 0, 0, 0, 2, 0, 0]), 4).float()
    right = torch.tensor([[0, 1], [0, 1], [0, 1], [0, 1], [2, -1], [2, -1], [3, -1]])
    missed, wrong = figures.ncl.mistakes(sim, right)
    assert missed.tolist() == [0, 0, 0.5, 1]
    assert wrong == pytest.approx([2 / 3, 0, 0, 0])
