"""NCL: Sinkhorn biases and losses against loops in float64, the queue and what is in it, normalisation at test time."""

import math
from types import SimpleNamespace

import common
from contrastive import evaluation, figures
from contrastive.data.batches import epoch_batches
from contrastive.engine.processes import UserError, flatten

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import eval as eval_py
import helpers
import ncl
from helpers import few_steps, fork, losses, panel, rows, run_script, unit, write_rows

N, D = 12, 6
SMALL = [*"--cpu --clips 64 16 16 --batch-size 16 --max-steps 4 --log-every 1 --eval-every 0".split()]


def pairs(n=N, d=D, noise=0.7, hub=0.0, seed=0):
    """Texts and the videos near them, (n, d) float64 each.

    hub: how far the videos lean, each by another length, to where all texts lean.
    """
    text, other, way = unit(n, d, seed=seed), unit(n, d, seed=seed + 1), unit(1, d, seed=seed + 2)
    lean = hub * torch.rand(n, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return F.normalize(text + hub * way, dim=1), F.normalize(text + noise * other + 2 * lean * way, dim=1)


# ---------------------------------------------------- Sinkhorn and the losses ---------------------------------------
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
@pytest.mark.parametrize("shape", [(16, 16), (40, 17), (5, 60)], ids=str)
def test_biases_against_a_loop(shape, priors):
    sim, shares = unit(shape[0], 8, seed=1) @ unit(shape[1], 8, seed=2).T, (None, None)
    if priors:
        shares = [F.normalize(0.2 + unit(1, n, seed=n)[0].abs(), p=1, dim=0) for n in shape]
    for gamma, iterations in ((0.01, 4), (0.05, 1), (0.05, 300)):
        expected = loop_sinkhorn(sim, gamma, iterations, *shares)
        for dtype, tolerance in ((torch.float32, 3e-3), (torch.float64, 1e-9)):
            got = ncl.sinkhorn_biases(sim.to(dtype), gamma, iterations, *shares)
            for bias, reference, size in zip(got, expected, shape):
                assert bias.shape == (size,) and bias.dtype == dtype
                assert ((bias.double() - reference) / gamma).abs().max() < tolerance
                assert (bias.double() / gamma).exp().sum().item() == pytest.approx(1, rel=1e-5)  # Eqs. 10, 11


@pytest.mark.parametrize("iterations", [4, 300])
def test_biases_are_finite_where_exp_overflows(iterations):
    column = torch.cat([torch.ones(9, 1), -torch.ones(9, 8)], 1)
    for sim in (torch.ones(16, 16), 2 * torch.eye(16) - 1, -torch.ones(4, 9), column):
        assert all(torch.isfinite(bias).all() for bias in ncl.sinkhorn_biases(sim, 0.01, iterations))
    e = torch.ones(16, 8, requires_grad=True)
    loss = ncl.ncl_loss(e, torch.ones(16, 8), 0.01, iterations, detach=False)
    loss.backward()
    assert torch.isfinite(e.grad).all() and loss.item() == pytest.approx(math.log(16))  # a random guess


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


@pytest.mark.parametrize("iterations", [0, 1, 4, 50])
@pytest.mark.parametrize("gamma", [0.01, 0.07, 1.0])
def test_ncl_loss_against_a_loop(gamma, iterations):
    text, video = pairs(hub=0.5)
    t2v, v2t = loop_ncl(text, video, gamma, iterations)
    for detach in (True, False):  # embeddings are normalised inside
        terms = ncl.ncl_terms(3 * text, 0.1 * video, gamma, iterations, detach)
        assert {k: v.item() for k, v in terms.items()} == pytest.approx({"L_t2v": t2v, "L_v2t": v2t}, rel=1e-9)
        assert ncl.ncl_loss(text, video, gamma, iterations, detach).item() == pytest.approx((t2v + v2t) / 2, rel=1e-9)
    single = ncl.ncl_loss(text.float(), video.float(), torch.tensor(gamma), iterations)
    assert single.item() == pytest.approx((t2v + v2t) / 2, rel=1e-3, abs=1e-5)


def gradients(iterations, detach):
    leaves = [x.requires_grad_() for x in pairs(24, 16, noise=1.5, hub=0.5)]
    return torch.autograd.grad(ncl.ncl_loss(*leaves, 0.05, iterations, detach), leaves)


def test_detached_biases_have_the_full_gradient_at_convergence():
    for rounds, near in ((500, True), (4, False)):
        for kept, free in zip(gradients(rounds, True), gradients(rounds, False)):
            apart = ((kept - free).norm() / free.norm()).item()
            assert apart < 1e-6 if near else apart > 0.01


def test_gradient_through_the_biases_is_the_derivative():
    leaves = [x.requires_grad_() for x in pairs(4, 3)] + [torch.tensor(0.2, dtype=torch.float64, requires_grad=True)]
    assert torch.autograd.gradcheck(lambda text, video, gamma: ncl.ncl_loss(text, video, gamma, detach=False), leaves)


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


def test_normalization_error():
    """Eq. 5: a fair item of n collects m / n of m queries; the error is relative to that."""
    p, q = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(1))  # rows (p, 1 - p), (q, 1 - q)
    hub, uneven = [[1.0, 0.0]] * 2, [[1.0, 0, 0]] * 4 + [[0, 1.0, 0]] * 2  # of 2; 4, 2 and 0 queries, 2 each were fair
    for sim, gamma, error in ((torch.zeros(10, 4), 0.05, 0), (torch.eye(7), 0.05, 0), (torch.ones(3, 1), 0.05, 0),
                              (torch.tensor([[0.2, 0.0], [0.0, 0.1]]), 0.1, abs(p + q - 1)),
                              (torch.tensor(hub), 0.01, 1), (torch.tensor(uneven), 0.01, 2 / 3)):
        assert common.normalization_error(sim, gamma) == pytest.approx(error)
    sim = torch.randn(5000, 3, generator=torch.Generator().manual_seed(0))  # in two parts
    expected = (1 - F.softmax(sim.double() / 0.5, 1).sum(0) * 3 / 5000).abs().mean().item()
    assert common.normalization_error(sim, 0.5) == pytest.approx(expected)
    assert 0 <= common.normalization_error(2 * torch.eye(5) - 1, 1e-6) < 1e-6


def test_queue_keeps_the_last_queries_oldest_first():
    """Fig. 5 and eval.py --queue-size take the last rows of what it gives for the latest queries."""
    def numbered(first, last):
        angle = torch.arange(first, last) / 10
        return torch.stack([angle.cos(), angle.sin()], 1)
    queue = ncl.QueryQueue(5, 2)
    assert queue.get().shape == (0, 2)
    # 2 and 3 do not divide 5; 12 is more than it holds
    for pushed, batch in ((2, 2), (4, 2), (6, 2), (8, 2), (11, 3), (12, 1), (24, 12), (26, 2)):
        queue.push(7 * numbered(pushed - batch, pushed).requires_grad_())  # any scale
        assert torch.allclose(queue.get(), numbered(max(0, pushed - 5), pushed), atol=1e-6)  # what is there, no zeros
    queue.push(numbered(0, 2).bfloat16())
    assert queue.get().dtype == torch.float32 and not queue.get().requires_grad


# ---------------------------------------------------- test time ------------------------------------------------------
def test_retrieval_biases_in_blocks_are_sinkhorn_s():
    """Blocks of 1,024 queries: the same biases as on the whole matrix, with the memory of a block."""
    items, queries = unit(50, D), unit(2500, D, seed=1)
    for gamma in (0.01, 0.1):
        expected = ncl.sinkhorn_biases(queries @ items.T, gamma)[1]
        assert torch.allclose(ncl.retrieval_biases(2 * items, 5 * queries, gamma), expected, atol=1e-9)


def pieces_of(text, image, owner=None, grouped=False):
    """What evaluation.retrieval.retrieval_pieces gives, for texts whose image is owner[i]."""
    owner = np.arange(len(text)) if owner is None else np.asarray(owner)
    groups = np.arange(len(image))
    return {"image": image, "text": text, "owner": owner, "data": SimpleNamespace(grouped=grouped),
            "positives": evaluation.retrieval.positives_table(groups[owner], groups),
            "positives_of_image": evaluation.retrieval.positives_table(groups, groups[owner])}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("way", ["text_to_image", "image_to_text"])
def test_a_hub_is_repaired(way, grouped, n=24, d=96):
    """All queries lean to one way; item 0 lies there, nearer to each query than its own item."""
    g = torch.Generator().manual_seed(0)
    lean, own = F.normalize(torch.randn(d, generator=g), dim=0), F.normalize(torch.randn(n, d, generator=g), dim=1)
    queries, *seen = (own + 1.5 * lean + 0.03 * torch.randn(n, d, generator=g) for _ in range(21))
    items, seen = own + 4 * lean * F.one_hot(torch.tensor(0), n)[:, None], torch.cat(seen)
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
        assert biases[mode][side].argmin() == 0 and biases[mode][side].shape == (n,)  # it is pushed back


def test_the_queue_of_texts_serves_the_videos():
    """Text -> video needs biases of the videos, from queries that are texts: exchanged queues give other numbers."""
    (text, video), (texts, videos) = pairs(20, hub=0.5), pairs(90, hub=0.5, seed=7)
    results, biases = ncl.normalized_retrieval(pieces_of(text, video), 0.05, 4, texts, videos)
    for mode, t, v in (("queue", texts, videos), ("oracle", text, video)):
        assert torch.allclose(biases[mode][0], loop_sinkhorn(t @ video.T, 0.05, 4)[1], atol=1e-9)
        assert torch.allclose(biases[mode][1], loop_sinkhorn(v @ text.T, 0.05, 4)[1], atol=1e-9)
        for way, sim in {"text_to_image": text @ video.T + biases[mode][0],
                         "image_to_text": video @ text.T + biases[mode][1]}.items():
            expected = (1 - F.softmax(sim / 0.05, 1).sum(0)).abs().mean().item()
            assert results[mode]["error"][way] == pytest.approx(expected)


def test_grouped_sets_rank_as_a_loop():
    """Uneven captions: biases per caption, maximum per video, rank of the own video; text -> video as ever."""
    image, owner = pairs(15, hub=0.5)[1], np.repeat(np.arange(15), [1, 2, 3] * 5)
    text = F.normalize(image[owner] + 0.9 * unit(30, D, seed=3), dim=1)
    results, _ = ncl.normalized_retrieval(pieces_of(text, image, owner, grouped=True), 0.05, 4)
    a, b = loop_sinkhorn(image @ text.T, 0.05, 4)[1], loop_sinkhorn(text @ image.T, 0.05, 4)[1]

    def mean_rank(scores, own):
        return np.mean([1 + sum(x >= row[i] for k, x in enumerate(row) if k != i) for row, i in zip(scores, own)])
    of_videos = [[max(x for x, k in zip(row, owner) if k == video) for video in range(15)]
                 for row in (image @ text.T + a).tolist()]
    assert results["oracle"]["image_to_text"]["MnR"] == pytest.approx(mean_rank(of_videos, range(15)))
    assert results["oracle"]["text_to_image"]["MnR"] == pytest.approx(mean_rank((text @ image.T + b).tolist(), owner))


# ---------------------------------------------------- runs -----------------------------------------------------------
def main(folder, *flags, pictures=False, script=ncl):
    return run_script(script, folder, *flags, base=SMALL, pictures=pictures)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ncl") / "run"
    return folder, main(folder, "--eval-every", 2)


def test_normalize_chooses_the_reported_numbers(run):
    """--normalize stands in front; the others beside it, and the training is the same."""
    folder, whole = run
    others = {mode: main(folder.parent / mode, "--normalize", mode) for mode in ("none", "oracle")}
    for split in ("val", "test"):
        of_all = whole[split]["moving-emoji"]["normalize"]
        assert list(of_all) == ["none", "queue", "oracle"] and of_all["queue"] != of_all["none"]
        for mode, summary in ({"queue": whole} | others).items():
            found = summary[split]["moving-emoji"]
            assert found["normalize"] == of_all and found["normalized_by"] == mode
            assert all(found[k] == of_all[mode][k] for k in ("text_to_image", "image_to_text", "R-Mean"))
    log = rows(folder)
    assert list(log[0]["eval"]["moving-emoji"]["normalize"]) == ["none", "oracle"]  # step 0: nothing is in the queue
    assert all(r["error_normalized"] < r["error"] and r["tau"] == 0.1 for r in log if "loss" in r)


def test_the_loss_is_that_of_its_terms_and_gamma_is_learnt(tmp_path):
    for flags, scale in (([], 0.5), (["--loss-scale", 3], 1.5), (["--loss", "max-margin"], 1)):
        for row in few_steps(ncl, tmp_path / f"{len(flags)}{flags[-1:]}", *flags, base=SMALL):
            assert row["loss"] == pytest.approx(scale * (row["L_t2v"] + row["L_v2t"]), rel=1e-5)
    main(tmp_path / "learnt", "--learnable-tau")
    gamma = load_file(tmp_path / "learnt" / "queues.safetensors")["gamma"].item()
    assert gamma == pytest.approx(rows(tmp_path / "learnt")[-2]["tau"], rel=1e-6) and abs(gamma - 0.1) > 1e-5


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
    assert ((queues["texts"] - text[:, order]).abs().amax(2).amin(0) < 1e-4).all()  # one of its three captions
    for split in ("val", "test"):
        video, text = encoded(split)
        assert torch.cdist(queues["videos"], video).min() > 1e-3
        assert torch.cdist(queues["texts"], text.flatten(0, 1)).min() > 1e-3


def evaluate(checkpoint, out, *flags):
    """Metrics of the checkpoint's own data set by eval.py --normalize queue."""
    flags = ["--normalize", "queue", "--tasks", "retrieval", "--checkpoint", checkpoint, "--output-dir", out, *flags]
    result = eval_py.main(eval_py.parse_args([*"--cpu --workers 0".split(), *map(str, flags)]))
    return next(iter(result["datasets"].values()))["metrics"]["normalize"]


def test_eval_options_of_the_normalisation(run, tmp_path):
    """By default those of the run; --queue-size takes the latest."""
    folder, summary = run
    own = evaluate(folder, tmp_path)
    assert flatten(own) == pytest.approx(flatten(summary["test"]["moving-emoji"]["normalize"]), rel=1e-4, abs=1e-4)
    same_as = {"--gamma 0.01": [], "--queue-size 5": ["none", "oracle"]}
    for flags, same in same_as.items():
        got = evaluate(folder, tmp_path, *flags.split())
        assert [k for k in ("none", "queue", "oracle") if got[k] == own[k]] == same
    latest = evaluate(folder, tmp_path, "--queue-size", 5)
    for flags, found in ((["--queue-size", 5], latest), (["--iterations", 1], None)):
        summary = main(tmp_path / flags[0][2:], *flags)
        found = found or evaluate(tmp_path / flags[0][2:], tmp_path)
        of_run = flatten(summary["test"]["moving-emoji"]["normalize"])
        assert flatten(found) == pytest.approx(of_run, rel=1e-4, abs=1e-4)


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """40 clips as SSB has them, and a csv: motion (time, 6) and appearance (time, 4) of one file each, other times."""
    root = tmp_path_factory.mktemp("features")
    helpers.write_features(root)
    captions = [(f"clip{i}", f"{w} number {i}", f"c{i % 2}") for i in range(40) for w in ("one", "another")]
    csv = write_rows(root / "clips.csv", ["video", "caption", "label"], captions)
    base = [*"--cpu --workers 0 --batch-size 8 --max-steps 3 --log-every 1 --image-encoder ssb".split(),
            *"--captioning-weight 0 --text-encoder small --text-pooling mean --no-pretrained --embed-dim 16".split(),
            *"--text-length 12 --frames 3".split()]
    return root, [*base, "--dataset", csv]


def test_features_end_to_end(features, tmp_path):
    root, base = features
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="^.*no file is found .looked for clip0.*$"):
        run_script(ncl, tmp_path / "r", "--feature-dir", tmp_path / "empty", base=base)
    flags = ["--feature-dir", root / "motion", root / "appearance"]
    summary = run_script(ncl, tmp_path / "r", *flags, base=base)
    csv, = summary["test"]
    assert summary["steps"] == 3 and losses(tmp_path / "r")[0] == pytest.approx(15 * math.log(8), rel=0.5)
    assert summary["chance"][csv]["trivial"].keys() == {"untrained"}  # features have no pixels and no colours
    of_run = flatten(summary["test"][csv]["normalize"])
    assert flatten(evaluate(tmp_path / "r", tmp_path)) == pytest.approx(of_run, rel=1e-4, abs=1e-4)
    more = [few_steps(ncl, tmp_path / f"{p}", *flags, "--dropout", p, base=base)[0]["loss"] for p in (0, 0.5)]
    assert more[0] != more[1]


def test_clip4clip_freezes_embeddings_and_first_norms(tiny, tmp_path, capsys):
    """As its scripts do (--freeze_layer_num 0): these stay as they were, all else learns; others are refused."""
    name, model = tiny("clip")
    clip = ["--image-encoder", name, "--text-encoder", name, "--pretrained", "--image-size", 32, "--text-length", 12,
            "--embed-dim", 16, "--max-steps", 2, "--lr", 0.01, "--weight-decay", 0.2]
    main(tmp_path / "r", *clip, "--freeze", "clip4clip")
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


# ---------------------------------------------------- pictures -------------------------------------------------------
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


def test_what_figures_3_and_7_count():
    """Fig. 3: four queries of items 0 and 1 find 0, two of item 2 find 2 and 0: one right item is no mistake. Fig. 7:
    one caption of each clip, or the first texts would be a few clips'."""
    sim = F.one_hot(torch.tensor([0, 0, 0, 0, 2, 0]), 3).float()
    missed, wrong = figures.ncl.mistakes(sim, torch.tensor([[0, 1]] * 4 + [[2, -1]] * 2))
    assert missed.tolist() == [0, 0, 0.5] and wrong.tolist() == [0.5, 0, 0]
    pieces = {"owner": np.repeat(np.arange(600), 3), "text": torch.arange(1800.0)[:, None],
              "image": torch.arange(600.0)[:, None]}
    found = figures.ncl.first_captions(pieces)
    assert found["text"][:, 0].tolist() == [3.0 * k for k in range(500)]
    assert found["image"][:, 0].tolist() == [float(k) for k in range(500)]
