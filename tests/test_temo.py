"""TeMo's equations against loops written from the paper, a step of main by hand, its log and
pictures."""

import copy
import dataclasses
import json
import math
from types import SimpleNamespace

import common
from contrastive.evaluation.similarities import similarity_histograms
from contrastive.evaluation.pieces import EvaluationPieces

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import temo
from contrastive.encoders.base import TwoTower
from variants import slip, temo_experts
from helpers import few_steps, fork, run_script, tensors_of, unit, write_images, write_rows
from temperature_schedules import nt_xent

N, D = 6, 5
SMALL = [
    *"--cpu --workers 0 --dataset moving-emoji --clips 32 16 16 --batch-size 16".split(),
    *"--image-size 16 --frames 2 --log-every 1 --eval-every 0".split(),
]


# ---------------------------------------------------- method --------------------------------------
def loop_info_nce(anchor, candidates, tau):
    """Eq. 1, averaged: plain Python over floats; tau(i, k) -> float."""
    total = 0.0
    for i in range(len(anchor)):
        logits = [float(anchor[i] @ candidates[k]) / tau(i, k) for k in range(len(candidates))]
        total += -logits[i] + math.log(sum(math.exp(x) for x in logits))
    return total / len(anchor)


def loop_tau(a, b, tau_min, tau_alpha, shifted=True):
    """Eq. 4 with similarities (1 + cosine) / 2, as the authors' code has it; or with the bare
    cosine."""

    def tau(i, k):
        cosine = float(a[i] @ b[k])
        return tau_min + tau_alpha * math.sqrt(
            (1 + cosine) / 2 if shifted else max(cosine, 0)
        )

    return tau


@pytest.mark.parametrize("shifted, tolerance", [(True, 1e-9), (False, 1e-3)])
@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_temo_loss_is_algorithm_1(t, shifted, tolerance):
    """Line by line; embeddings are normalised inside."""
    I, T, I2, T2 = views = [unit(N, D, seed=s) for s in range(4)]

    def plain(a, b):
        return loop_info_nce(a, b, lambda i, k: 0.1)

    def modulated(a, b):
        return loop_info_nce(a, b, loop_tau(a, b, 0.05, 0.2, shifted))

    between = (1 - t) ** 2 * (plain(I, T) + plain(T, I)) / 2 + t**2 * (
        modulated(I, T) + modulated(T, I)
    ) / 2
    expected = between + t**2 * (modulated(I, I2) + modulated(T, T2))
    found = temo.temo_loss(*(3 * x for x in views), t, 0.1, 0.05, 0.2, shifted=shifted)
    assert found.item() == pytest.approx(expected, rel=tolerance)


def test_temperatures_by_hand():
    """Eq. 4 at the paper's values, and the baselines: five periods of TS, DySTreSS in both forms.
    """
    sim = torch.tensor([-1.0, -0.3, 0.0, 0.05, 0.4, 1.0], dtype=torch.float64)
    by_hand = [0.01 + 0.04 * math.sqrt((1 + s) / 2) for s in sim.tolist()]
    assert temo.modulated_temperature(sim).tolist() == pytest.approx(by_hand, rel=1e-3)
    assert temo.modulated_temperature(sim)[[2, 5]].tolist() == pytest.approx(
        [0.0383, 0.05], abs=5e-5
    )
    assert [temo.ts_temperature(p) for p in (0.0, 0.1, 0.2, 1.0)] == pytest.approx(
        [0.05, 0.01, 0.05, 0.05]
    )
    halves = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0], dtype=torch.float64)
    assert temo.dystress_temperature(halves, 0.01, 0.05).tolist() == pytest.approx(
        [0.05, 0.03, 0.01, 0.03, 0.05]
    )
    shifted = temo.dystress_temperature(sim, 0.01, 0.04, shifted=True)
    assert shifted[[0, 1, 3, 4, 5]].tolist() == pytest.approx([0.04, 0.01, 0.025, 0.04, 0.04])


def test_table_3_rows():
    views, t = [unit(N, D, seed=s) for s in range(4)], 0.3
    mm = temo.multimodal_loss(*views[:2], 0.01)
    mod = temo.multimodal_loss(*views[:2], temo.modulated_temperature)
    plain = temo.info_nce(views[0], views[2], 0.01) + temo.info_nce(views[1], views[3], 0.01)
    modulate = temo.modulated_temperature
    uni = temo.info_nce(views[0], views[2], modulate) + temo.info_nce(views[1], views[3], modulate)
    rows = {
        "a": mm,
        "b": mod,
        "c": mm / 2 + plain / 2,
        "d": mm / 2 + mod / 2,
        "e": 0.49 * mm + 0.09 * mod,
        "f": mm / 2 + (mod + uni) / 2,
        "g": 0.49 * mm + 0.09 * (mod + uni),
    }
    assert rows.keys() == temo.ROWS.keys()
    for row, expected in rows.items():
        assert torch.isclose(temo.temo_loss(*views, t, **temo.ROWS[row]), expected), row


def test_experts():
    """L_MM + w_I CE(I I^T / tau^I) + w_T CE(T T^T / tau^T): each expert sets the temperatures of
    its own modality."""
    embeddings = {"image": unit(N, D, seed=1), "text": unit(N, D, seed=2)}
    features = {"image": unit(N, 3, seed=9), "text": unit(N, 4, seed=8)}
    terms = {}
    loss = temo_experts.expert_loss(
        *embeddings.values(), *features.values(), 0.01, 0.01, 0.04, terms=terms
    )
    for kind, x in embeddings.items():
        expected = loop_info_nce(x, x, loop_tau(features[kind], features[kind], 0.01, 0.04))
        assert terms[f"L_E-{kind}"].item() == pytest.approx(expected, rel=1e-9)
    assert terms["L_MM"] == temo.multimodal_loss(*embeddings.values(), 0.01)
    expected = terms["L_MM"] + 0.6 * terms["L_E-image"] + 0.4 * terms["L_E-text"]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


def test_cwcl_loss():
    """Value and gradient; none flows through the weights."""
    image, text = (unit(N, D, seed=s).requires_grad_() for s in (1, 2))
    weight = (1 + image.detach() @ image.detach().T) / 2
    log_p = (F.normalize(image, dim=1) @ F.normalize(text, dim=1).T / 0.05).log_softmax(1)
    literal = (-(weight * log_p).sum(1) / weight.sum(1)).mean() / 2 + temo.info_nce(
        text, image, 0.05
    ) / 2
    found = temo.cwcl_loss(image, text, 0.05)
    torch.testing.assert_close(found, literal)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss, (image, text)) for loss in (found, literal))
    )


# ---------------------------------------------------- runs ----------------------------------------
@pytest.fixture(scope="module")
def paraphrased(tmp_path_factory):
    """The flags of 80 images with a caption each and three paraphrases of each caption."""
    folder = tmp_path_factory.mktemp("set")
    names = write_images(folder, range(80))
    csv = write_rows(
        folder / "data.csv",
        ["image", "caption"],
        [(x, f"caption {i}") for i, x in enumerate(names)],
    )
    lines = [(f"caption {i}", [f"said {i}", f"told {i}", f"put {i}"]) for i in range(80)]
    return [
        "--dataset",
        csv,
        "--paraphrases",
        write_rows(folder / "p.jsonl", ["caption", "paraphrases"], lines),
    ]


STEP = (
    "--cpu --workers 0 --max-steps 1 --batch-size 16 --log-every 1 --row f --tau 0.2 "
    "--tau-min 0.1 --tau-alpha 0.3 --eval-every 0 --grad-clip 0 --optimizer sgd --betas 0 0 "
    "--weight-decay 0 --image-size 24"
).split()


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--grad-augmented",
        "--chunk-size 5 --no-paraphrase-anchor",
        "--detach-tau --similarity cosine",
    ],
)
def test_a_step_against_an_independent_computation(words, paraphrased, tmp_path, monkeypatch):
    """One step of plain SGD: which texts are T and T~, what is encoded without gradient, and the
    loss and the gradient by hand from the weights before it."""
    text_pair, build_model = common.text_pair, common.build_model
    plain_forward = TwoTower.forward
    seen, texts, before = [], [], []

    def forward(model, pixels=None, tokens=None):
        if model.training:
            seen.append((torch.is_grad_enabled(), pixels))
        return plain_forward(model, pixels, tokens)

    def watched_model(*args):
        built = build_model(*args)
        before.extend((copy.deepcopy(built[0]).eval(), built[1]))
        return built

    monkeypatch.setattr(TwoTower, "forward", forward)
    monkeypatch.setattr(common, "build_model", watched_model)
    monkeypatch.setattr(
        common, "text_pair", lambda *a, **k: texts.append(text_pair(*a, **k)) or texts[-1]
    )
    log = few_steps(temo, tmp_path / "r", *paraphrased, *words.split(), "--lr", 0.1, base=STEP)

    # the texts: T is the caption or one of its paraphrases, T~ one of the paraphrases, of the
    # same caption
    ((first, second),) = texts
    assert [t.split()[1] for t in first] == [t.split()[1] for t in second] and len(set(first)) == 16
    assert {t.split()[0] for t in second} == {"said", "told", "put"}
    others = set() if "--no-paraphrase-anchor" in words else {"said", "told", "put"}
    assert {t.split()[0] for t in first} == {"caption"} | others
    # the forwards: I~ and T~ first, with gradient if --grad-augmented; then I and T; in chunks of 5
    # without gradient, and with it in backward, those of I first
    grad = "--grad-augmented" in words
    if "--chunk-size" in words:
        assert [with_grad for with_grad, _ in seen] == [False] * 8 + [True] * 4
    else:
        assert [with_grad for with_grad, _ in seen] == [grad, True]
    # loss and gradient from the weights before the step
    num_forwards = 4 if "--chunk-size" in words else 1
    augmented = torch.cat([x for _, x in seen[:num_forwards]])             # (B, 3, S, S)
    plain = torch.cat([x for _, x in seen[num_forwards : 2 * num_forwards]])
    pixels = [plain, augmented]
    assert not torch.equal(*pixels)
    model, tokenizer = before
    I, I2 = (F.normalize(model(x)[0], dim=1).double() for x in pixels)
    T, T2 = (F.normalize(model(tokens=tokenizer(t))[1], dim=1).double() for t in (first, second))
    I2, T2 = (I2, T2) if "--grad-augmented" in words else (I2.detach(), T2.detach())

    def ce(a, b, modulated):
        s = a @ b.T
        of = s.detach() if "--detach-tau" in words else s
        of = of.clamp(min=1e-12) if "--similarity" in words else (1 + of) / 2
        logits = s / (0.1 + 0.3 * of.sqrt() if modulated else 0.2)
        return -(logits.diagonal() - logits.logsumexp(1)).mean()

    multimodal = ce(I, T, False) + ce(T, I, False) + ce(I, T, True) + ce(T, I, True)
    loss = multimodal / 4 + (ce(I, I2, True) + ce(T, T2, True)) / 2
    assert log[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    after = tensors_of(tmp_path / "r", 1)
    largest = max(p.grad.abs().max().item() for p in model.parameters())
    for name, p in model.named_parameters():
        step = (p - after[f"model/{name}"]) / 0.1
        assert torch.allclose(step, p.grad, rtol=1e-3, atol=1e-3 * largest), name


def test_the_loss_is_made_of_the_terms_in_its_log(tmp_path):
    """Eq. 8 at t = steps before this one / all steps, L_MM at the learnt tau of the step."""
    words = "--max-steps 6 --lr 0.1 --learnable-tau".split()
    for k, row in enumerate(few_steps(temo, tmp_path / "a", *words, base=SMALL)):
        t = k / 6
        expected = (1 - t) ** 2 * row["L_MM"] + t**2 * (
            row["L_M-MM"] + row["L_M-I2I"] + row["L_M-T2T"]
        )
        assert row["loss"] == pytest.approx(expected, rel=1e-4), k


def test_the_log_has_the_temperature_of_the_loss(tmp_path):
    """That of the step, or the means of the pairs; that of terms without --tau is not in it."""
    words = "--loss ts --max-steps 6".split()
    log = few_steps(temo, tmp_path / "ts", *words, base=SMALL)
    expected = [temo.ts_temperature(k / 6, 0.05, 0.15) for k in range(6)]
    assert [row["tau"] for row in log] == pytest.approx(expected)
    for words in ("--loss dystress", "--row b"):
        folder = tmp_path / words.split()[1]
        (row,) = few_steps(temo, folder, *words.split(), "--max-steps", 1, base=SMALL)
        assert "L_MM" not in row and "tau" not in row
        assert row["tau_pos"] > 0.05 and row["tau_neg"] > 0.05
    # no pair has a temperature of its own
    (row,) = few_steps(temo, tmp_path / "c", "--row", "c", "--max-steps", 1, base=SMALL)
    assert "tau_pos" not in row and "tau_neg" not in row and row["tau"] == pytest.approx(0.1)


def test_the_baseline_is_infonce_with_everything_else_equal(tmp_path):
    ours = few_steps(temo, tmp_path / "a", "--baseline", "--max-steps", 2, base=SMALL)
    same = few_steps(temo, tmp_path / "b", "--loss", "infonce", "--max-steps", 2, base=SMALL)
    assert [row["loss"] for row in ours] == [row["loss"] for row in same]
    baseline, method = (vars(temo.parse_args(words)) for words in (["--baseline"], []))
    different = {name for name in method if baseline[name] != method[name]}
    assert different == {"loss", "baseline", "command_line", "changed", "method_flags"}


def test_slip_adds_its_image_loss(tmp_path):
    """At weight 1 and temperature 0.1; NT-Xent, as TS has it."""
    z1, z2 = unit(N, D, seed=3), unit(N, D, seed=4)
    found = slip.slip_loss(unit(N, D, seed=1), unit(N, D, seed=2), z1, z2, 0.07)
    expected = temo.multimodal_loss(unit(N, D, seed=1), unit(N, D, seed=2), 0.07)
    expected = expected + nt_xent(z1, z2, 0.1)
    assert found.item() == pytest.approx(expected.item(), rel=1e-9)
    flags = "--cpu --workers 0 --batch-size 16 --image-size 16 --log-every 1 --eval-every 0"
    for row in few_steps(slip, tmp_path / "a", *flags.split(), "--max-steps", 2):
        assert row["loss"] == pytest.approx(row["L_MM"] + row["L_image"], rel=1e-4)


def test_the_paper_s_run_without_its_paraphrases_is_warned_of(tmp_path):
    train = SimpleNamespace(
        templates=(), streamed=False, first_captions=lambda limit: ["a cat", "a dog", "a cow"]
    )
    lines = [("a cat", ["x"]), ("a dog", ["x"])]
    some = common.Paraphrases(write_rows(tmp_path / "p.jsonl", ["caption", "paraphrases"], lines))
    assert common.describe_texts(train, None, True, temo.CC3M["source"]).startswith(
        "WARNING: NOT THE PAPER'S T~"
    )
    assert "; 1 of the first 3 have none" in common.describe_texts(
        train, some, True, temo.CC3M["source"]
    )
    assert "WARNING" not in common.describe_texts(train, None, True, temo.OWN["source"])


# ---------------------------------------------------- pictures ------------------------------------
def test_zero_shot_along_training(tmp_path):
    """Fig. 7: a set with classes and no captions gives top-1 by prompts in the log and the summary;
    emoji has none."""
    for split, numbers in (("train", range(12)), ("val", range(12, 21)), ("test", range(21, 30))):
        for c, name in enumerate(("apple", "pear_tree", "zebra")):
            write_images(tmp_path / "classes" / split / name, [i for i in numbers if i % 3 == c])
    flags = "--cpu --workers 0 --max-steps 2 --batch-size 16 --eval-every 1 --image-size 16".split()
    summary = run_script(
        temo, tmp_path / "r", *flags, "--eval-datasets", tmp_path / "classes", "emoji"
    )
    logged = [
        json.loads(line).get("eval", {})
        for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    ]
    assert ["zero-shot" in of.get(str(tmp_path / "classes"), ()) for of in logged if of] == [
        True
    ] * 3  # steps 0, 1, 2
    assert "top1" in summary["test"][str(tmp_path / "classes")]["zero-shot"]
    assert "zero-shot" not in summary["test"]["emoji"]


def test_the_threshold_of_figures_4_and_5():
    """The cosine from which on positives are denser; none if the two are alike."""
    image, noise = unit(300, 64, seed=1), unit(300, 64, seed=2)
    pieces = EvaluationPieces(
        image=image,
        text=F.normalize(image + noise),
        owner=np.arange(300),
        positives=torch.arange(300)[:, None],
    )  # cosines of pairs about 0.7, of others 0
    found = similarity_histograms(pieces)
    low = found["edges"].index(found["threshold"])
    assert 0.2 < found["threshold"] < 0.65 and found["positive"][low] > found["negative"][low]
    assert found["positive"][low - 1] <= found["negative"][low - 1]
    for other in (-image, noise):  # unrelated texts: densities cross by chance
        unlike = dataclasses.replace(pieces, text=other)
        assert similarity_histograms(unlike)["threshold"] is None


def test_a_fork_s_temperature_is_in_the_loss_and_in_the_log(tmp_path):
    """Its modulated_temperature is what trains, and gives tau_pos and tau_neg of Fig. 2."""
    own = fork(
        temo,
        tmp_path,
        "return tau_min + tau_alpha * sim.clamp(min=1e-8).sqrt()",
        "return tau_min + tau_alpha + 0 * sim",
    )
    log = few_steps(own, tmp_path / "fork", "--max-steps", 2, base=SMALL)
    for row in log:
        assert [row["tau_pos"], row["tau_neg"]] == pytest.approx([0.15, 0.15], abs=1e-6)
    usual = few_steps(temo, tmp_path / "usual", "--max-steps", 2, base=SMALL)
    assert log[1]["loss"] != usual[1]["loss"]


def test_a_loss_without_a_branch_is_refused(tmp_path):
    own = fork(temo, tmp_path, '"cwcl"]\n', '"cwcl", "mine"]\n')
    with pytest.raises(ValueError, match="--loss mine has no branch"):
        few_steps(own, tmp_path / "fork", "--loss", "mine", "--max-steps", 1, base=SMALL)


@pytest.mark.parametrize("progress", [-0.1, 1.01, float("nan")])
def test_progress_is_a_part_of_the_run(progress):
    image, text = torch.randn(2, 4, 8)
    with pytest.raises(ValueError, match=r"give step / all steps, 0\.\.1"):
        temo.temo_loss(image, text, image, text, progress)


def test_without_a_crop_the_views_have_the_shape_of_the_evaluation():
    """As in the other scripts."""
    for squash, words in ((True, "--eval-resize squash"), (False, "")):
        args = temo.parse_args(f"--crop-min 1 --image-aug crop {words}".split())
        views = [common.training_view(args), common.training_view(args, "crop")]
        assert [view.squash for view in views] == [squash, squash]
