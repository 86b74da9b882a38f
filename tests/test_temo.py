"""TeMo's equations against loops written from the paper, a step of main by hand, and its log."""

import copy
import math

import common
from contrastive.evaluation.pieces import EvaluationPieces
from contrastive.evaluation.similarities import similarity_histograms

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import temo
from contrastive.encoders.base import TwoTower
from variants import slip, temo_experts
from helpers import (
    assert_close, few_steps, fork, rows, run_script, tensors_of, unit, write_images, write_rows)
from temperature_schedules import nt_xent

N, D = 6, 5
SMALL = (
    "--cpu --workers 0 --dataset moving-emoji --clips 32 16 16 --batch-size 16 --image-size 16 "
    "--frames 2 --log-every 1 --eval-every 0").split()


# ---------------------------------------------------- method --------------------------------------
def loop_info_nce(anchor, candidates, tau):
    """Eq. 1, averaged: plain Python over floats; tau(cosine) -> float."""
    total = 0.0
    for i in range(len(anchor)):
        logits = []
        for candidate in candidates:
            cosine = float(anchor[i] @ candidate)
            logits.append(cosine / tau(cosine))
        total += math.log(sum(math.exp(x) for x in logits)) - logits[i]
    return total / len(anchor)


def shifted_tau(cosine):
    """Eq. 4 with similarities (1 + cosine) / 2, as the authors' code has it."""
    return 0.05 + 0.2 * math.sqrt((1 + cosine) / 2)


def bare_tau(cosine):
    """Eq. 4 as printed, 0 for negative cosines."""
    return 0.05 + 0.2 * math.sqrt(max(cosine, 0))


@pytest.mark.parametrize("shifted, tau, tolerance", [
    (True, shifted_tau, 1e-9), (False, bare_tau, 1e-3)])
@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_temo_loss_is_algorithm_1(t, shifted, tau, tolerance):
    """Line by line; embeddings are normalised inside."""
    I, T, I2, T2 = views = [unit(N, D, seed=seed) for seed in range(4)]

    def plain(a, b):
        return loop_info_nce(a, b, lambda cosine: 0.1)

    def modulated(a, b):
        return loop_info_nce(a, b, tau)

    expected = (1 - t) ** 2 * (plain(I, T) + plain(T, I)) / 2
    expected += t**2 * (modulated(I, T) + modulated(T, I)) / 2
    expected += t**2 * (modulated(I, I2) + modulated(T, T2))
    loss = temo.temo_loss(*(3 * x for x in views), t, 0.1, 0.05, 0.2, shifted=shifted)
    assert loss.item() == pytest.approx(expected, rel=tolerance)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


TEMPERATURES = {  # of a baseline or of TeMo, and by hand
    "Eq. 4": (
        temo.modulated_temperature(tensor(-1.0, 0.0, 0.4, 1.0)),
        [0.01, 0.01 + 0.04 * 0.5**0.5, 0.01 + 0.04 * 0.7**0.5, 0.05]),
    "five periods of TS": (
        tensor(*(temo.ts_temperature(progress) for progress in (0.0, 0.1, 0.2, 1.0))),
        [0.05, 0.01, 0.05, 0.05]),
    "DySTreSS": (
        temo.dystress_temperature(tensor(-1.0, -0.5, 0.0, 0.5, 1.0), 0.01, 0.05),
        [0.05, 0.03, 0.01, 0.03, 0.05]),
    "DySTreSS, shifted": (
        temo.dystress_temperature(tensor(-1.0, -0.3, 0.05, 0.4, 1.0), 0.01, 0.04, shifted=True),
        [0.04, 0.01, 0.025, 0.04, 0.04])}


@pytest.mark.parametrize("name", TEMPERATURES)
def test_temperatures_by_hand(name):
    taus, expected = TEMPERATURES[name]
    assert taus.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("row, weights", [  # of L_MM, L_M-MM, plain and modulated I2I + T2T
    ("a", (1, 0, 0, 0)),
    ("b", (0, 1, 0, 0)),
    ("c", (0.5, 0, 0.5, 0)),
    ("d", (0.5, 0.5, 0, 0)),
    ("e", (0.49, 0.09, 0, 0)),
    ("f", (0.5, 0.5, 0, 0.5)),
    ("g", (0.49, 0.09, 0, 0.09))])
def test_rows_of_table_3_have_their_terms(row, weights):
    I, T, I2, T2 = views = [unit(N, D, seed=seed) for seed in range(4)]
    modulate = temo.modulated_temperature
    terms = [
        temo.multimodal_loss(I, T, 0.01),
        temo.multimodal_loss(I, T, modulate),
        temo.info_nce(I, I2, 0.01) + temo.info_nce(T, T2, 0.01),
        temo.info_nce(I, I2, modulate) + temo.info_nce(T, T2, modulate)]
    expected = sum(weight * term for weight, term in zip(weights, terms))
    assert_close(temo.temo_loss(*views, 0.3, **temo.ROWS[row]), expected)


@pytest.mark.parametrize("unimodal", ["plain", "modulated"])
def test_a_unimodal_loss_needs_second_views(unimodal):
    x = unit(4, 8)
    with pytest.raises(ValueError, match="needs image_aug and text_aug"):
        temo.temo_loss(x, x, None, None, 0.1, unimodal=unimodal)


@pytest.mark.parametrize("progress", [-0.1, 1.01, float("nan")])
def test_progress_is_a_part_of_the_run(progress):
    x = unit(4, 8)
    with pytest.raises(ValueError, match="progress="):
        temo.temo_loss(x, x, x, x, progress)


def test_experts_set_the_temperatures_of_their_modality():
    """L_MM + w_I CE(I I^T / tau^I) + w_T CE(T T^T / tau^T)."""
    image, text = unit(N, D, seed=1), unit(N, D, seed=2)
    image_features, text_features = unit(N, 3, seed=9), unit(N, 4, seed=8)
    expected = temo.multimodal_loss(image, text, 0.01)
    for weight, x, features in ((0.6, image, image_features), (0.4, text, text_features)):
        tau = temo.modulated_temperature(features @ features.T, 0.01, 0.04)
        expected = expected + weight * temo.info_nce(x, x, tau)
    loss = temo_experts.expert_loss(image, text, image_features, text_features, 0.01, 0.01, 0.04)
    assert_close(loss, expected)


def test_cwcl_loss_has_no_gradient_through_its_weights():
    """Value and gradient."""
    image, text = (unit(N, D, seed=seed).requires_grad_() for seed in (1, 2))
    weight = (1 + image.detach() @ image.detach().T) / 2
    log_p = (F.normalize(image, dim=1) @ F.normalize(text, dim=1).T / 0.05).log_softmax(1)
    image_to_text = (-(weight * log_p).sum(1) / weight.sum(1)).mean()
    expected = (image_to_text + temo.info_nce(text, image, 0.05)) / 2
    loss = temo.cwcl_loss(image, text, 0.05)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, (image, text)), torch.autograd.grad(expected, (image, text)))


def test_slip_adds_its_image_loss():
    """At weight 1 and temperature 0.1; NT-Xent, as TS has it."""
    image, text, z1, z2 = (unit(N, D, seed=seed) for seed in range(4))
    expected = temo.multimodal_loss(image, text, 0.07) + nt_xent(z1, z2, 0.1)
    assert_close(slip.slip_loss(image, text, z1, z2, 0.07), expected)


# ---------------------------------------------------- a step of main ------------------------------
@pytest.fixture(scope="module")
def paraphrased(tmp_path_factory):
    """The flags of 80 images with a caption each and three paraphrases of each caption."""
    folder = tmp_path_factory.mktemp("set")
    captions = [(name, f"caption {i}") for i, name in enumerate(write_images(folder, range(80)))]
    paraphrases = [(f"caption {i}", [f"said {i}", f"told {i}", f"put {i}"]) for i in range(80)]
    data = write_rows(folder / "data.csv", ["image", "caption"], captions)
    lines = write_rows(folder / "p.jsonl", ["caption", "paraphrases"], paraphrases)
    return ["--dataset", data, "--paraphrases", lines]


STEP = (
    "--cpu --workers 0 --max-steps 1 --batch-size 16 --log-every 1 --row f --tau 0.2 "
    "--tau-min 0.1 --tau-alpha 0.3 --eval-every 0 --grad-clip 0 --optimizer sgd --betas 0 0 "
    "--weight-decay 0 --image-size 24 --lr 0.1").split()


class Watch:
    """What main encodes in a step, with the model as it was before."""

    def __init__(self, monkeypatch):
        self.forwards = []  # (with gradient?, pixels)
        self.texts = ()  # T, T~
        text_pair, build_model = common.text_pair, common.build_model
        forward = TwoTower.forward

        def watched_forward(model, pixels=None, tokens=None):
            if model.training:
                self.forwards.append((torch.is_grad_enabled(), pixels))
            return forward(model, pixels, tokens)

        def watched_model(*args):
            model, tokenizer, transform = build_model(*args)
            self.model, self.tokenizer = copy.deepcopy(model).eval(), tokenizer
            return model, tokenizer, transform

        def watched_texts(*args, **options):
            self.texts = text_pair(*args, **options)
            return self.texts

        monkeypatch.setattr(TwoTower, "forward", watched_forward)
        monkeypatch.setattr(common, "build_model", watched_model)
        monkeypatch.setattr(common, "text_pair", watched_texts)

    def images(self):
        """I and I~, (B, 3, S, S) each: I~ is encoded first, without chunks at once."""
        half = max(1, len(self.forwards) // 3)  # chunks are encoded once more in backward
        augmented = torch.cat([pixels for _, pixels in self.forwards[:half]])
        plain = torch.cat([pixels for _, pixels in self.forwards[half : 2 * half]])
        return plain, augmented


@pytest.mark.parametrize("words, first_texts", [
    ("", {"caption", "said", "told", "put"}),
    ("--no-paraphrase-anchor", {"caption"})])
def test_texts_of_a_step_are_paraphrases_of_one_caption(  # noqa: PLR0917
        words, first_texts, paraphrased, tmp_path, monkeypatch):
    watch = Watch(monkeypatch)
    few_steps(temo, tmp_path / "r", *paraphrased, *words.split(), base=STEP)
    first, second = watch.texts
    assert [text.split()[1] for text in first] == [text.split()[1] for text in second]
    assert {text.split()[0] for text in first} == first_texts
    assert {text.split()[0] for text in second} == {"said", "told", "put"}


def loss_by_hand(watch, words):
    """Row f from the weights before the step, as the paper has it."""
    encode_texts = [watch.tokenizer(texts) for texts in watch.texts]
    I, I2 = (F.normalize(watch.model(x)[0], dim=1).double() for x in watch.images())
    T, T2 = (F.normalize(watch.model(tokens=x)[1], dim=1).double() for x in encode_texts)
    if "--grad-augmented" not in words:
        I2, T2 = I2.detach(), T2.detach()

    def cross_entropy(anchor, candidates, tau=None):
        sim = anchor @ candidates.T
        if tau is None:
            similarity = (1 + sim) / 2
            if "--similarity cosine" in words:
                similarity = sim.clamp(min=1e-8)
            if "--detach-tau" in words:
                similarity = similarity.detach()
            tau = 0.1 + 0.3 * similarity.sqrt()
        return F.cross_entropy(sim / tau, torch.arange(len(anchor)))

    plain = (cross_entropy(I, T, 0.2) + cross_entropy(T, I, 0.2)) / 2
    modulated = (cross_entropy(I, T) + cross_entropy(T, I)) / 2
    return (plain + modulated + cross_entropy(I, I2) + cross_entropy(T, T2)) / 2


@pytest.mark.parametrize("words, with_gradient", [
    ("", [False, True]),
    ("--grad-augmented", [True, True]),
    # in chunks of 5 without gradient, and with it in backward, those of I first
    ("--chunk-size 5", [False] * 8 + [True] * 4),
    ("--detach-tau --similarity cosine", [False, True])])
def test_a_step_is_an_independent_computation(  # noqa: PLR0917
        words, with_gradient, paraphrased, tmp_path, monkeypatch):
    """One step of plain SGD: what is encoded with gradient, the loss, and the gradient."""
    watch = Watch(monkeypatch)
    (row,) = few_steps(temo, tmp_path / "r", *paraphrased, *words.split(), base=STEP)
    assert [enabled for enabled, _ in watch.forwards] == with_gradient
    assert not torch.equal(*watch.images())
    loss = loss_by_hand(watch, words)
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    after = tensors_of(tmp_path / "r", 1)
    largest = max(p.grad.abs().max().item() for p in watch.model.parameters())
    for name, p in watch.model.named_parameters():
        gradient = (p - after[f"model/{name}"]) / 0.1
        assert torch.allclose(gradient, p.grad, rtol=1e-3, atol=1e-3 * largest), name


# ---------------------------------------------------- the log -------------------------------------
def test_the_loss_is_made_of_the_terms_in_its_log(tmp_path):
    """Eq. 8 at t = steps before this one / all steps, L_MM at the learnt tau of the step."""
    words = "--max-steps 6 --lr 0.1 --learnable-tau".split()
    for k, row in enumerate(few_steps(temo, tmp_path / "a", *words, base=SMALL)):
        t = k / 6
        modulated = row["L_M-MM"] + row["L_M-I2I"] + row["L_M-T2T"]
        expected = (1 - t) ** 2 * row["L_MM"] + t**2 * modulated
        assert row["loss"] == pytest.approx(expected, rel=1e-4), k


def test_the_log_has_the_tau_of_the_step(tmp_path):
    log = few_steps(temo, tmp_path / "ts", *"--loss ts --max-steps 6".split(), base=SMALL)
    expected = [temo.ts_temperature(k / 6, 0.05, 0.15) for k in range(6)]
    assert [row["tau"] for row in log] == pytest.approx(expected)


def test_a_fork_s_temperature_is_in_the_loss_and_in_the_log(tmp_path):
    """Its modulated_temperature is what trains, and gives tau_pos and tau_neg of Fig. 2."""
    own = fork(
        temo, tmp_path,
        "return tau_min + tau_alpha * sim.clamp(min=1e-8).sqrt()",
        "return tau_min + tau_alpha + 0 * sim")
    for row in few_steps(own, tmp_path / "fork", "--row", "b", "--max-steps", 2, base=SMALL):
        assert [row["tau_pos"], row["tau_neg"]] == pytest.approx([0.15, 0.15], abs=1e-6)
        assert row["loss"] == pytest.approx(row["L_M-MM"])


# ---------------------------------------------------- figures and views ---------------------------
def test_zero_shot_along_training(tmp_path):
    """Fig. 7: a set with classes and no captions gives top-1 by prompts at each evaluation."""
    classes = tmp_path / "classes"
    for split, numbers in (("train", range(12)), ("val", range(12, 21)), ("test", range(21, 30))):
        for c, name in enumerate(("apple", "pear_tree", "zebra")):
            write_images(classes / split / name, [i for i in numbers if i % 3 == c])
    flags = [*SMALL[:-2], "--max-steps", 2, "--eval-every", 1]
    summary = run_script(
        temo, tmp_path / "r", *flags, "--eval-datasets", classes, "moving-emoji")
    evaluations = [row["eval"][str(classes)] for row in rows(tmp_path / "r") if "eval" in row]
    assert len(evaluations) == 3  # steps 0, 1, 2
    for result in (*evaluations, summary["test"][str(classes)]):
        assert "top1" in result["zero-shot"]
    assert "zero-shot" not in summary["test"]["moving-emoji"]


IMAGE, NOISE = unit(300, 64, seed=1), unit(300, 64, seed=2)


def histograms(text):
    """Of Figs. 4 and 5."""
    pieces = EvaluationPieces(
        image=IMAGE, text=text, owner=np.arange(300), positives=torch.arange(300)[:, None])
    return similarity_histograms(pieces)


def test_threshold_is_the_cosine_from_which_on_positives_are_denser():
    result = histograms(F.normalize(IMAGE + NOISE))  # cosines of pairs about 0.7, of others 0
    k = result["edges"].index(result["threshold"])
    assert 0.2 < result["threshold"] < 0.65
    assert result["positive"][k] > result["negative"][k]
    assert result["positive"][k - 1] <= result["negative"][k - 1]


@pytest.mark.parametrize("text", [-IMAGE, NOISE])
def test_unrelated_texts_have_no_threshold(text):
    assert histograms(text)["threshold"] is None
