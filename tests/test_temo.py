"""TeMo's equations against loops written from the paper, a step of main by hand, and its log."""

import copy
import functools

import common
from contrastive.evaluation.pieces import EvaluationPieces
from contrastive.evaluation.similarities import similarity_histograms

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import temo
from helpers import (
    CLASSES, assert_close, caption, few_steps, fork, rows, run_script, tensors_of, unit,
    write_captions, write_images, write_rows)
from temperature_schedules import nt_xent
from tools.check import drift
from variants import slip, temo_experts

N, D = 6, 5
VIEWS = [unit(N, D, seed=seed) for seed in range(4)]
IMAGE, TEXT, IMAGE_AUG, TEXT_AUG = VIEWS
SMALL = (
    "--cpu --workers 0 --dataset moving-emoji --clips 32 16 16 --batch-size 16 --image-size 16 "
    "--frames 2 --log-every 1 --eval-every 0").split()


# ---------------------------------------------------- method --------------------------------------
def loop_info_nce(anchor, candidates, tau_of):
    """Eq. 1, averaged; tau_of(cosines) -> temperatures."""
    total = 0.0
    for i in range(N):
        cosines = candidates @ anchor[i]
        logits = cosines / tau_of(cosines)
        total += logits.exp().sum().log() - logits[i]
    return total / N


def fixed_tau(cosines):
    return 0.1


def shifted_tau(cosines):
    """Eq. 4 with similarities (1 + cosine) / 2, as the authors' code has it."""
    return 0.05 + 0.2 * ((1 + cosines) / 2).sqrt()


def bare_tau(cosines):
    """Eq. 4 as printed; 0 for negative cosines is 1e-8 here."""
    return 0.05 + 0.2 * cosines.clamp(min=1e-8).sqrt()


@pytest.mark.parametrize("shifted, tau_ij", [(True, shifted_tau), (False, bare_tau)])
@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_temo_loss_is_algorithm_1(t, shifted, tau_ij):
    """Line by line; embeddings are normalised inside."""
    L_I2T = loop_info_nce(IMAGE, TEXT, fixed_tau)
    L_T2I = loop_info_nce(TEXT, IMAGE, fixed_tau)
    L_M_I2T = loop_info_nce(IMAGE, TEXT, tau_ij)
    L_M_T2I = loop_info_nce(TEXT, IMAGE, tau_ij)
    L_M_I2I = loop_info_nce(IMAGE, IMAGE_AUG, tau_ij)
    L_M_T2T = loop_info_nce(TEXT, TEXT_AUG, tau_ij)
    L_MM = (L_I2T + L_T2I) / 2
    L_M_MM = (L_M_I2T + L_M_T2I) / 2
    L_M = L_M_MM + L_M_I2I + L_M_T2T
    expected = (1 - t) ** 2 * L_MM + t**2 * L_M
    views = [3 * view for view in VIEWS]
    loss = temo.temo_loss(*views, t, 0.1, 0.05, 0.2, shifted=shifted)
    assert_close(loss, expected, 1e-9)


@pytest.mark.parametrize("temperature, cosines, expected", [
    (
        temo.modulated_temperature,
        [-1.0, 0.0, 0.4, 1.0],
        [0.01, 0.01 + 0.04 * 0.5**0.5, 0.01 + 0.04 * 0.7**0.5, 0.05]),
    (
        temo.dystress_temperature,
        [-1.0, -0.5, 0.0, 0.5, 1.0],
        [0.04, 0.025, 0.01, 0.025, 0.04]),
    (
        functools.partial(temo.dystress_temperature, shifted=True),
        [-1.0, -0.3, 0.05, 0.4, 1.0],
        [0.04, 0.01, 0.025, 0.04, 0.04])])
def test_temperatures_by_hand(temperature, cosines, expected):
    """Of Eq. 4 and of the baseline DySTreSS."""
    tau_ij = temperature(torch.tensor(cosines))
    assert tau_ij.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("row, weights", [  # of L_MM, L_M-MM, plain and modulated I2I + T2T
    ("a", (1, 0, 0, 0)),
    ("b", (0, 1, 0, 0)),
    ("c", (0.5, 0, 0.5, 0)),
    ("d", (0.5, 0.5, 0, 0)),
    ("e", (0.49, 0.09, 0, 0)),
    ("f", (0.5, 0.5, 0, 0.5)),
    ("g", (0.49, 0.09, 0, 0.09))])
def test_rows_of_table_3_have_their_terms(row, weights):
    tau_ij = temo.modulated_temperature
    L_MM = temo.multimodal_loss(IMAGE, TEXT, 0.01)
    L_M_MM = temo.multimodal_loss(IMAGE, TEXT, tau_ij)
    plain = temo.info_nce(IMAGE, IMAGE_AUG, 0.01) + temo.info_nce(TEXT, TEXT_AUG, 0.01)
    modulated = temo.info_nce(IMAGE, IMAGE_AUG, tau_ij) + temo.info_nce(TEXT, TEXT_AUG, tau_ij)
    terms = torch.stack([L_MM, L_M_MM, plain, modulated])
    loss = temo.temo_loss(*VIEWS, 0.3, **temo.ROWS[row])
    assert_close(loss, terms @ torch.tensor(weights, dtype=torch.float64))


@pytest.mark.parametrize("unimodal", ["plain", "modulated"])
def test_a_unimodal_loss_needs_second_views(unimodal):
    with pytest.raises(ValueError, match="needs image_aug and text_aug"):
        temo.temo_loss(IMAGE, TEXT, None, None, 0.1, unimodal=unimodal)


@pytest.mark.parametrize("progress", [-0.1, 1.01])
def test_progress_is_a_part_of_the_run(progress):
    with pytest.raises(ValueError, match="progress="):
        temo.temo_loss(*VIEWS, progress)


def test_experts_set_the_temperatures_of_their_modality():
    """L_MM + w_I CE(I I^T / tau^I) + w_T CE(T T^T / tau^T)."""
    image_features = unit(N, 3, seed=9)
    text_features = unit(N, 4, seed=8)
    tau_I = temo.modulated_temperature(image_features @ image_features.T, 0.01, 0.04)
    tau_T = temo.modulated_temperature(text_features @ text_features.T, 0.01, 0.04)
    expected = temo.multimodal_loss(IMAGE, TEXT, 0.01)
    expected += 0.6 * temo.info_nce(IMAGE, IMAGE, tau_I)
    expected += 0.4 * temo.info_nce(TEXT, TEXT, tau_T)
    loss = temo_experts.expert_loss(IMAGE, TEXT, image_features, text_features, 0.01, 0.01, 0.04)
    assert_close(loss, expected)


def test_cwcl_loss_has_no_gradient_through_its_weights():
    """Value and gradient."""
    image, text = (unit(N, D, seed=seed).requires_grad_() for seed in (1, 2))
    w = (1 + image.detach() @ image.detach().T) / 2
    sim = F.normalize(image, dim=1) @ F.normalize(text, dim=1).T
    log_p = (sim / 0.05).log_softmax(1)
    L_i = -(w * log_p).sum(1) / w.sum(1)
    L_T2I = F.cross_entropy(sim.T / 0.05, torch.arange(N))
    expected = (L_i.mean() + L_T2I) / 2
    loss = temo.cwcl_loss(image, text, 0.05)
    assert_close(loss, expected)
    gradients = torch.autograd.grad(loss, (image, text))
    assert_close(gradients, torch.autograd.grad(expected, (image, text)))


def test_slip_adds_its_image_loss():
    """At weight 1 and temperature 0.1; NT-Xent, as TS has it."""
    z1, z2 = IMAGE_AUG, TEXT_AUG
    expected = temo.multimodal_loss(IMAGE, TEXT, 0.07) + nt_xent(z1, z2, 0.1)
    assert_close(slip.slip_loss(IMAGE, TEXT, z1, z2, 0.07), expected)


# ---------------------------------------------------- a step of main ------------------------------
@pytest.fixture(scope="module")
def paraphrased(tmp_path_factory):
    """The flags of 40 images with a caption each and three paraphrases of each caption."""
    folder = tmp_path_factory.mktemp("set")
    data = write_captions(folder, 40)
    table = []
    for i in range(40):
        paraphrases = [f"said number {i},", f"told number {i},", f"put number {i},"]
        table.append((caption(i), paraphrases))
    file = write_rows(folder / "p.jsonl", ["caption", "paraphrases"], table)
    return ["--dataset", data, "--paraphrases", file]


@pytest.mark.parametrize("flags, first_words", [
    ([], {"picture", "said", "told", "put"}),
    (["--no-paraphrase-anchor"], {"picture"})])
def test_texts_of_a_step_are_paraphrases_of_one_caption(  # noqa: PLR0917
        flags, first_words, paraphrased, tmp_path, monkeypatch):
    pairs, text_pair = [], common.text_pair

    def watched_text_pair(*args, **options):
        pairs.append(text_pair(*args, **options))
        return pairs[-1]

    monkeypatch.setattr(common, "text_pair", watched_text_pair)
    few_steps(temo, tmp_path / "run", *paraphrased, *flags, "--max-steps", 1, base=SMALL)
    ((first, second),) = pairs
    first_verbs, _, first_numbers, *_ = zip(*map(str.split, first))
    verbs, _, numbers, *_ = zip(*map(str.split, second))
    assert first_numbers == numbers
    assert set(first_verbs) == first_words
    assert set(verbs) == {"said", "told", "put"}


def test_augmented_images_are_encoded_with_augmented_texts_first(tmp_path, monkeypatch):
    batch_views, token_pairs, calls = [], [], []
    iterate, tokenize_pair = common.Batches.__iter__, common.tokenize_pair
    encode = common.GradCache.encode

    def watched_batches(self):
        for batch in iterate(self):
            batch_views.append(batch["views"])
            yield batch

    def watched_tokenize_pair(*args):
        token_pairs.append(tokenize_pair(*args))
        return token_pairs[-1]

    def watched_encode(grad_cache, pixels, tokens):
        calls.append((pixels, tokens))
        return encode(grad_cache, pixels=pixels, tokens=tokens)

    monkeypatch.setattr(common.Batches, "__iter__", watched_batches)
    monkeypatch.setattr(common, "tokenize_pair", watched_tokenize_pair)
    monkeypatch.setattr(common.GradCache, "encode", watched_encode)
    few_steps(temo, tmp_path / "run", "--max-steps", 1, base=SMALL)
    ((view, augmented_view),), ((tokens, augmented_tokens),) = batch_views, token_pairs
    (first_pixels, first_tokens), (pixels, second_tokens) = calls
    assert first_pixels is augmented_view and first_tokens is augmented_tokens
    assert pixels is view and second_tokens is tokens


STEP = (
    "--max-steps 1 --row f --tau 0.2 --tau-min 0.1 --tau-alpha 0.3 --grad-clip 0 --optimizer sgd "
    "--betas 0 0 --weight-decay 0 --lr 0.1").split()


def embeddings_of(model, inputs):
    image, text, _ = model(**inputs)
    return F.normalize(image, dim=1).double(), F.normalize(text, dim=1).double()


def plain_loss(anchor, candidates):
    sim = anchor @ candidates.T
    return F.cross_entropy(sim / 0.2, torch.arange(len(anchor)))


def modulated_loss(anchor, candidates, words):
    sim = anchor @ candidates.T
    similarity = (1 + sim) / 2
    if "--similarity cosine" in words:
        similarity = sim.clamp(min=1e-8)
    if "--detach-tau" in words:
        similarity = similarity.detach()
    tau_ij = 0.1 + 0.3 * similarity.sqrt()
    return F.cross_entropy(sim / tau_ij, torch.arange(len(anchor)))


@pytest.mark.parametrize("words, with_gradient", [
    ("", [False, True]),
    ("--grad-augmented", [True, True]),
    ("--detach-tau --similarity cosine", [False, True])])
def test_a_step_is_an_independent_computation(words, with_gradient, tmp_path, monkeypatch):
    """Row f after one step of SGD: what is encoded with gradient, the loss, and the gradient."""
    models, calls, encode = [], [], common.GradCache.encode

    def watched_encode(grad_cache, **inputs):
        models.append(copy.deepcopy(grad_cache.model))
        calls.append((torch.is_grad_enabled(), inputs))
        return encode(grad_cache, **inputs)

    monkeypatch.setattr(common.GradCache, "encode", watched_encode)
    (row,) = few_steps(temo, tmp_path / "run", *STEP, *words.split(), base=SMALL)
    assert [is_enabled for is_enabled, _ in calls] == with_gradient
    (_, augmented_inputs), (_, inputs) = calls
    assert not torch.equal(augmented_inputs["pixels"], inputs["pixels"])

    model = models[0]
    image, text = embeddings_of(model, inputs)
    image_aug, text_aug = embeddings_of(model, augmented_inputs)
    if "--grad-augmented" not in words:
        image_aug = image_aug.detach()
        text_aug = text_aug.detach()
    L_MM = (plain_loss(image, text) + plain_loss(text, image)) / 2
    L_M_I2T = modulated_loss(image, text, words)
    L_M_T2I = modulated_loss(text, image, words)
    L_M_MM = (L_M_I2T + L_M_T2I) / 2
    L_M_I2I = modulated_loss(image, image_aug, words)
    L_M_T2T = modulated_loss(text, text_aug, words)
    loss = (L_MM + L_M_MM + L_M_I2I + L_M_T2T) / 2
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-5)

    loss.backward()
    saved = tensors_of(tmp_path / "run", 1)
    start, after, expected = {}, {}, {}
    for name, p in model.named_parameters():
        start[name] = p
        after[name] = saved[f"model/{name}"]
        expected[name] = p - 0.1 * p.grad
    assert drift(after, expected, start) < 0.01


def test_a_learnt_tau_is_clipped_with_the_encoders(tmp_path):
    flags = (
        "--max-steps 2 --save-every 1 --baseline --learnable-tau --optimizer sgd --betas 0 0 "
        "--weight-decay 0 --lr 1 --lr-schedule constant --grad-clip 0.01").split()
    few_steps(temo, tmp_path / "run", *flags, base=SMALL)
    before, after = tensors_of(tmp_path / "run", 1), tensors_of(tmp_path / "run", 2)
    changes = []
    for path, x in after.items():
        if path.startswith(("model/", "tau/")):
            changes.append((x - before[path]).flatten())
    assert torch.cat(changes).norm() == pytest.approx(0.01, rel=1e-2)


# ---------------------------------------------------- the log -------------------------------------
def test_the_loss_is_made_of_the_terms_in_its_log(tmp_path):
    """Eq. 8 at t = steps before this one / all steps, L_MM at the learnt tau of the step."""
    words = "--max-steps 6 --lr 0.1 --learnable-tau".split()
    for k, row in enumerate(few_steps(temo, tmp_path / "run", *words, base=SMALL)):
        t = k / 6
        modulated = row["L_M-MM"] + row["L_M-I2I"] + row["L_M-T2T"]
        expected = (1 - t) ** 2 * row["L_MM"] + t**2 * modulated
        assert row["loss"] == pytest.approx(expected, rel=1e-4), k


def test_baseline_ts_has_five_periods_in_a_run(tmp_path):
    """From the highest temperature to the lowest in two steps, and back in the next two."""
    log = few_steps(temo, tmp_path / "run", *"--loss ts --max-steps 20".split(), base=SMALL)
    taus = [row["tau"] for row in log]
    assert taus == pytest.approx([0.15, 0.1, 0.05, 0.1] * 5)


def test_a_fork_s_temperature_is_in_the_loss_and_in_the_log(tmp_path):
    """Its modulated_temperature is what trains, and gives tau_pos and tau_neg of Fig. 2."""
    own = fork(
        temo, tmp_path,
        "return tau_min + tau_alpha * sim.clamp(min=1e-8).sqrt()",
        "return tau_min + tau_alpha + 0 * sim")
    for row in few_steps(own, tmp_path / "run", "--row", "b", "--max-steps", 2, base=SMALL):
        assert row["tau_pos"] == pytest.approx(0.15)
        assert row["tau_neg"] == pytest.approx(0.15)
        assert row["loss"] == pytest.approx(row["L_M-MM"])


# ---------------------------------------------------- figures -------------------------------------
def test_zero_shot_along_training(tmp_path):
    """Fig. 7: a set with classes and no captions gives top-1 by prompts at each evaluation."""
    classes = tmp_path / "classes"
    for split, numbers in (("train", range(9)), ("val", range(9, 15)), ("test", range(15, 21))):
        for i in numbers:
            write_images(classes / split / CLASSES[i % 3], [i])
    flags = ["--max-steps", 2, "--eval-every", 1, "--eval-datasets", classes, "moving-emoji"]
    summary = run_script(temo, tmp_path / "run", *flags, base=SMALL)
    evaluations = [row["eval"] for row in rows(tmp_path / "run") if "eval" in row]
    assert len(evaluations) == 3  # steps 0, 1, 2
    for results in (*evaluations, summary["test"]):
        assert "top1" in results[str(classes)]["zero-shot"]
    assert "zero-shot" not in summary["test"]["moving-emoji"]


IMAGES = unit(300, 64, seed=1)
NOISE = unit(300, 64, seed=2)


def histograms(text):
    """Of Figs. 4 and 5."""
    pieces = EvaluationPieces(
        image=IMAGES, text=text, owner=np.arange(300), positives=torch.arange(300)[:, None])
    return similarity_histograms(pieces)


def test_threshold_is_the_cosine_from_which_on_positives_are_denser():
    result = histograms(F.normalize(IMAGES + NOISE))  # cosines of pairs about 0.7, of others 0
    threshold, positive, negative = result["threshold"], result["positive"], result["negative"]
    k = result["edges"].index(threshold)
    assert 0.2 < threshold < 0.65
    assert positive[k] > negative[k]
    assert positive[k - 1] <= negative[k - 1]


@pytest.mark.parametrize("text", [-IMAGES, NOISE])
def test_unrelated_texts_have_no_threshold(text):
    assert histograms(text)["threshold"] is None
