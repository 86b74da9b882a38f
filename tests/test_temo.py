"""TeMo's equations against loops written from the paper, in float64; its views and texts, its log and pictures."""

import json
import math
from types import SimpleNamespace

import common
from contrastive import engine, figures

import pytest
import torch
import torch.nn.functional as F

import temo
import temperature_schedules
from helpers import few_steps, fork, panel, picture, run_script, steps, unit, write_images

N, D = 6, 5


def loop_info_nce(anchor, candidates, tau):
    """Eq. 1, averaged: plain Python over floats; tau(i, k) -> float."""
    total = 0.0
    for i in range(len(anchor)):
        logits = [float(anchor[i] @ candidates[k]) / tau(i, k) for k in range(len(candidates))]
        total += -logits[i] + math.log(sum(math.exp(l) for l in logits))
    return total / len(anchor)


def loop_tau(a, b, tau_min, tau_alpha):
    """Eq. 4 with similarities (1 + cosine) / 2, as the authors' code has it."""
    return lambda i, k: tau_min + tau_alpha * math.sqrt((1 + float(a[i] @ b[k])) / 2)


def loop_tau_of_cosine(a, b, tau_min, tau_alpha):
    """--similarity cosine."""
    return lambda i, k: tau_min + tau_alpha * math.sqrt(max(float(a[i] @ b[k]), 0.0))


def loop_temo(image, text, image_aug, text_aug, t, tau, tau_min, tau_alpha, loop_tau=loop_tau):
    """Algorithm 1, line by line."""
    def I(a, b, temperature):
        return loop_info_nce(a, b, temperature)
    mm = (I(image, text, lambda i, k: tau) + I(text, image, lambda i, k: tau)) / 2
    i2t = I(image, text, loop_tau(image, text, tau_min, tau_alpha))
    m_mm = (i2t + I(text, image, loop_tau(text, image, tau_min, tau_alpha))) / 2
    ii = I(image, image_aug, loop_tau(image, image_aug, tau_min, tau_alpha))
    tt = I(text, text_aug, loop_tau(text, text_aug, tau_min, tau_alpha))
    return (1 - t) ** 2 * mm + t ** 2 * (m_mm + ii + tt)


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tau,tau_min,tau_alpha", [(0.01, 0.01, 0.04), (0.1, 0.05, 0.1)])
def test_temo_loss_is_algorithm_1(progress, tau, tau_min, tau_alpha):
    views = [unit(N, D, seed=s) for s in range(4)]
    expected = loop_temo(*views, progress, tau, tau_min, tau_alpha)
    assert temo.temo_loss(*views, progress, tau, tau_min, tau_alpha).item() == pytest.approx(expected, rel=1e-9)
    bare = loop_temo(*views, progress, tau, tau_min, tau_alpha, loop_tau=loop_tau_of_cosine)
    got = temo.temo_loss(*views, progress, tau, tau_min, tau_alpha, similarity="cosine")
    assert got.item() == pytest.approx(bare, rel=1e-3)
    assert (abs(bare - expected) > 1e-3) == bool(progress)
    scaled = [3.0 * v.float() for v in views]  # embeddings are normalised inside; fp32
    assert temo.temo_loss(*scaled, progress, tau, tau_min, tau_alpha).item() == pytest.approx(expected, rel=1e-3)


def test_modulated_temperature():
    """Eq. 4 by hand in float64, and its gradient by differences: tau_min at -1, 0.0383 at 0, 0.05 at 1."""
    sim = torch.tensor([-1.0, -0.5, 0.0, 0.1, 0.25, 1.0], dtype=torch.float64, requires_grad=True)
    tau = temo.modulated_temperature(sim, 0.01, 0.04)
    by_hand = [0.01 + 0.04 * math.sqrt((1 + s) / 2) for s in sim.tolist()]
    assert tau[0].item() == pytest.approx(by_hand[0], rel=1e-3)            # the root's argument is at least 1e-8
    assert tau[1:].tolist() == pytest.approx(by_hand[1:], rel=1e-12)
    assert tau[[2, 3, 5]].tolist() == pytest.approx([0.0383, 0.0397, 0.05], abs=5e-5)
    gradient, = torch.autograd.grad(tau.sum(), sim)
    assert torch.isfinite(gradient).all()
    h = 1e-6
    for s, g in zip(sim.tolist()[1:-1], gradient.tolist()[1:-1]):
        both = temo.modulated_temperature(torch.tensor([s + h, s - h], dtype=torch.float64), 0.01, 0.04)
        assert g == pytest.approx((both[0] - both[1]).item() / (2 * h), rel=1e-6)


def test_detach_changes_the_gradient_not_the_loss():
    """Without it d/ds of s / tau(s), with it of s / tau: by differences, at s = 0.25."""
    a, b = unit(N, D, seed=1).requires_grad_(), unit(N, D, seed=2)
    kept, free = (temo.modulated_loss(a, b, 0.01, 0.04, detach=d) for d in (True, False))
    assert kept == free and not torch.allclose(*(torch.autograd.grad(loss, a)[0] for loss in (kept, free)))
    s, h = torch.tensor(0.25, dtype=torch.float64, requires_grad=True), 1e-6
    tau = {x: 0.01 + 0.04 * math.sqrt((1 + x) / 2) for x in (0.25 - h, 0.25, 0.25 + h)}
    slopes = {True: 1 / tau[0.25], False: ((0.25 + h) / tau[0.25 + h] - (0.25 - h) / tau[0.25 - h]) / (2 * h)}
    for detach, expected in slopes.items():
        got, = torch.autograd.grad(s / temo.pair_temperature(s, "temo", 0.01, 0.04, detach), s)
        assert got.item() == pytest.approx(expected, rel=1e-6)


def test_table_3_rows():
    views, t = [unit(N, D, seed=s) for s in range(4)], 0.3
    mm, mod = temo.multimodal_loss(*views[:2], 0.01), temo.modulated_multimodal_loss(*views[:2], 0.01, 0.04)
    plain = temo.info_nce(views[0], views[2], 0.01) + temo.info_nce(views[1], views[3], 0.01)
    uni = temo.modulated_loss(views[0], views[2], 0.01, 0.04) + temo.modulated_loss(views[1], views[3], 0.01, 0.04)
    rows = {"a": (dict(modulated=False, unimodal="none"), mm),
            "b": (dict(base=False, unimodal="none"), mod),
            "c": (dict(modulated=False, unimodal="plain", blend="fixed"), mm / 2 + plain / 2),
            "d": (dict(unimodal="none", blend="fixed"), mm / 2 + mod / 2),
            "e": (dict(unimodal="none"), 0.49 * mm + 0.09 * mod),
            "f": (dict(blend="fixed"), mm / 2 + (mod + uni) / 2),
            "g": ({}, 0.49 * mm + 0.09 * (mod + uni))}
    for row, (flags, expected) in rows.items():
        assert torch.isclose(temo.temo_loss(*views, t, **flags), expected), row


def test_experts():
    """L_MM + w_I CE(I I^T / tau^I) + w_T CE(T T^T / tau^T): each expert sets the temperatures of its own modality."""
    image, text = (unit(N, D, seed=s).requires_grad_() for s in (1, 2))
    features = {"image": unit(N, 3, seed=9), "text": unit(N, 4, seed=8)}
    terms = temo.expert_terms({"image": image, "text": text}, features, 0.01, 0.01, 0.04)
    for kind, x in (("image", image), ("text", text)):
        expected = loop_info_nce(x, x, loop_tau(features[kind], features[kind], 0.01, 0.04))
        assert terms[f"L_E-{kind}"].item() == pytest.approx(expected, rel=1e-9)
    assert terms["L_MM"] == temo.multimodal_loss(image, text, 0.01)
    assert set(temo.expert_terms({"image": image, "text": text}, {"text": features["text"]})) == {"L_MM", "L_E-text"}
    args = temo.parse_args(["--image-expert", "a/b", "--text-expert", "c/d"])
    assert temo.weights_of(args, 0.5) == {"L_MM": 1.0, "L_E-image": 0.6, "L_E-text": 0.4}


# ---------------------------------------------------- baselines ------------------------------------------------------
def test_ts_schedule():
    values = [temo.ts_temperature(p) for p in (0.0, 0.1, 0.2, 0.3, 1.0)]
    assert values == pytest.approx([0.05, 0.01, 0.05, 0.01, 0.05])  # five periods: half a period is 0.1


def test_dystress_temperature():
    s = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0], dtype=torch.float64)
    assert temo.dystress_temperature(s, 0.01, 0.05).tolist() == pytest.approx([0.05, 0.03, 0.01, 0.03, 0.05])
    s = torch.tensor([-1.0, -0.3, 0.05, 0.4, 0.5, 1.0], dtype=torch.float64)
    shifted = [0.01 + 0.015 * (1 + math.cos(math.pi * (x - 0.4) / 0.7)) if x <= 0.4 else 0.04 for x in s.tolist()]
    got = temo.dystress_temperature(s, 0.01, 0.04, shifted=True).tolist()
    assert got == pytest.approx(shifted) and got[1:4] == pytest.approx([0.01, 0.025, 0.04])


def test_cwcl_loss():
    image, text, tau = unit(N, D, seed=1), unit(N, D, seed=2), 0.05
    total = 0.0
    for i in range(N):
        logits = [float(image[i] @ text[j]) / tau for j in range(N)]
        lse = math.log(sum(math.exp(l) for l in logits))
        w = [(1 + float(image[i] @ image[j])) / 2 for j in range(N)]
        total -= sum(wj * (l - lse) for wj, l in zip(w, logits)) / sum(w)
    expected = (total / N + loop_info_nce(text, image, lambda i, k: tau)) / 2
    assert temo.cwcl_loss(image, text, tau).item() == pytest.approx(expected)
    w, x, y = (1 + image @ image.T) / 2, *(e.clone().requires_grad_() for e in (image, text))  # no gradient in w
    log_p = (F.normalize(x, dim=1) @ F.normalize(y, dim=1).T / tau).log_softmax(1)
    literal = (-(w * log_p).sum(1) / w.sum(1)).mean() / 2 + temo.info_nce(y, x, tau) / 2
    torch.testing.assert_close(*(torch.autograd.grad(loss, (x, y)) for loss in (temo.cwcl_loss(x, y, tau), literal)))


def test_slip_image_loss_is_nt_xent():
    z1, z2 = unit(N, D, seed=1), unit(N, D, seed=2)
    assert temo.simclr_loss(z1, z2, 0.1) == temperature_schedules.nt_xent(z1, z2, 0.1)


# ---------------------------------------------------- runs ----------------------------------------------------------
@pytest.mark.parametrize("flags, flips", [
    ([], [0.5, 0.5]), (["--dataset", "moving-emoji", "--clips", "130", "8", "8"], [0, 0]), (["--flip", "0"], [0, 0]),
    (["--image-aug", "simclr", "--aug-flip", "0.1"], [0.5, 0.1]), (["--image-aug", "crop"], [0.5, 0]),
    (["--row", "e"], [0.5]), (["--loss", "slip", "--flip", "0"], [0, 0.5, 0.5])])
def test_the_views_by_image_aug(flags, flips, tmp_path, monkeypatch):
    class Views(Exception):
        pass
    def stop(run, views, transform):
        raise Views([v.flip for v in views])
    monkeypatch.setattr(engine.run.Run, "batches", stop)
    with pytest.raises(Views) as found:
        temo.main(temo.parse_args([*flags, "--cpu", "--output-dir", str(tmp_path)]))
    assert found.value.args[0] == flips


SMALL = [*"--cpu --workers 0 --dataset moving-emoji --clips 32 16 16 --batch-size 16 --image-size 16".split(),
         *"--frames 2 --log-every 1 --eval-every 0".split()]


def test_the_loss_is_made_of_the_terms_in_its_log(tmp_path):
    """Eq. 8 at t = steps before this one / all steps."""
    for k, row in enumerate(few_steps(temo, tmp_path / "a", "--max-steps", 6, "--lr", 0.1, base=SMALL)):
        t = k / 6
        expected = (1 - t) ** 2 * row["L_MM"] + t ** 2 * (row["L_M-MM"] + row["L_M-I2I"] + row["L_M-T2T"])
        assert row["loss"] == pytest.approx(expected, rel=1e-4), k


def test_the_temperature_of_ts_is_that_of_the_step(tmp_path):
    log = few_steps(temo, tmp_path / "a", "--loss", "ts", "--max-steps", 6, base=SMALL)
    assert [row["tau"] for row in log] == pytest.approx([temo.ts_temperature(k / 6, 0.05, 0.15) for k in range(6)])
    assert len({round(row["tau"], 4) for row in log}) > 1


@pytest.mark.parametrize("words", ["--loss dystress", "--row b"])
def test_the_temperature_of_a_loss_without_tau_is_the_mean_of_its_pairs(words, tmp_path):
    row, = few_steps(temo, tmp_path / "a", *words.split(), "--max-steps", 1, base=SMALL)
    assert row["tau"] == pytest.approx((row["tau_pos"] + 15 * row["tau_neg"]) / 16) != 0.1


def test_slip_adds_its_weighted_image_loss(tmp_path, monkeypatch):
    seen, simclr_loss = [], temo.simclr_loss
    monkeypatch.setattr(temo, "simclr_loss", lambda *args: (seen.append(args[:2]), simclr_loss(*args))[1])
    log = few_steps(temo, tmp_path / "a", "--loss", "slip", "--no-learnable-tau", "--max-steps", 2, base=SMALL)
    for row, (z1, z2) in zip(log, seen, strict=True):
        assert not torch.allclose(z1, z2)
        assert row["loss"] == pytest.approx(row["L_MM"] + temperature_schedules.nt_xent(z1, z2, 0.1).item(), rel=1e-4)


def test_the_paper_s_run_without_its_paraphrases_is_warned_of(tmp_path):
    train = SimpleNamespace(templates=(), streamed=False, first_captions=lambda limit: ["a cat", "a dog", "a cow"])
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"caption": c, "paraphrases": ["x"]}) + "\n"
                                              for c in train.first_captions(3)[:2]))
    some, paper = common.Paraphrases(tmp_path / "p.jsonl"), temo.CC3M["recipe"]
    assert common.text_words(train, None, True, paper).startswith("WARNING: NOT THE PAPER'S T~")
    said = common.text_words(train, some, True, paper)
    assert said.startswith("WARNING") and "of 2 captions, " in said and "; 1 of the first 3 have none" in said
    assert "WARNING" not in common.text_words(train, None, True, temo.OWN["recipe"])


QUICK = "--cpu --workers 0 --max-steps 2 --batch-size 16 --log-every 1".split()


@pytest.mark.parametrize("flags", [[], ["--grad-augmented"], ["--chunk-size", "5"], ["--detach-tau"],
                                   ["--no-paraphrase-anchor"], ["--similarity", "cosine"]])
def test_a_step_against_an_independent_computation(flags, tmp_path, monkeypatch):
    """One step of plain SGD on a tiny set: which texts are T and T~, what is encoded without gradient, and the loss and
    the gradient by hand from the weights before it."""
    write_images(tmp_path / "images", range(80))
    rows = ["image,caption", *(f"images/{i:03}.png,caption {i}" for i in range(80))]
    (tmp_path / "data.csv").write_text("\n".join(rows) + "\n")
    lines = [{"caption": f"caption {i}", "paraphrases": [f"said {i}", f"told {i}", f"put {i}"]} for i in range(80)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    encode, text_pair, seen, texts = temo.encode, temo.text_pair, [], []
    def spy(model, inputs, slip):
        seen.append((torch.is_grad_enabled() and model.training, inputs["pixels"]))
        return encode(model, inputs, slip)
    monkeypatch.setattr(temo, "encode", spy)
    monkeypatch.setattr(temo, "text_pair", lambda *a, **k: texts.append(text_pair(*a, **k)) or texts[-1])
    rate, size = 0.1, 16
    common_flags = [*QUICK, "--max-steps", 1, "--dataset", tmp_path / "data.csv", "--paraphrases", tmp_path / "p.jsonl",
                    *"--row f --tau 0.2 --tau-min 0.1 --tau-alpha 0.3 --eval-every 0 --grad-clip 0 --optimizer sgd "
                     "--beta1 0 --weight-decay 0 --image-size 24".split(), *flags]
    run_script(temo, tmp_path / "before", *common_flags, "--lr", 0, "--lr-end", 0)
    seen.clear(), texts.clear()
    run_script(temo, tmp_path / "after", *common_flags, "--lr", rate)

    # the texts: T is the caption or one of its paraphrases, T~ one of the paraphrases, of the same caption
    (first, second), = texts
    assert [t.split()[1] for t in first] == [t.split()[1] for t in second] and len(set(first)) == size
    assert {t.split()[0] for t in second} == {"said", "told", "put"}
    kinds = {t.split()[0] for t in first}
    assert kinds == {"caption"} if "--no-paraphrase-anchor" in flags else kinds == {"caption", "said", "told", "put"}
    # the forwards: I~ and T~ alone and without gradient, or with I and T
    alone, chunked = "--grad-augmented" not in flags, "--chunk-size" in flags
    forwards = [(grad, sorted(pixels)) for grad, pixels in seen]
    once = [(False, [1])] * (4 if chunked else 1) + [(False, [0])] * 4 * chunked + [(True, [0])] * (4 if chunked else 1)
    assert forwards == (once if alone else [(True, [0, 1])])
    # loss and gradient from the weights before the step
    pixels = [torch.cat([views[k] for _, views in seen if k in views])[:size] for k in (0, 1)]      # (B, 3, S, S) each
    assert not torch.equal(*pixels)
    model, tokenizer, _ = common.load_model(tmp_path / "before")
    I, I2 = (F.normalize(model(x)[0], dim=1).double() for x in pixels)
    T, T2 = (F.normalize(model(tokens=tokenizer(t))[1], dim=1).double() for t in (first, second))
    I2, T2 = (I2.detach(), T2.detach()) if alone else (I2, T2)

    def ce(a, b, modulated):
        s = a @ b.T
        of = s.detach() if "--detach-tau" in flags else s
        of = of.clamp(min=1e-12) if "--similarity" in flags else (1 + of) / 2
        logits = s / (0.1 + 0.3 * of.sqrt() if modulated else 0.2)
        return -(logits.diagonal() - logits.logsumexp(1)).mean()
    multimodal = ce(I, T, False) + ce(T, I, False) + ce(I, T, True) + ce(T, I, True)
    loss = multimodal / 4 + (ce(I, I2, True) + ce(T, T2, True)) / 2
    assert steps(tmp_path / "after")[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    after = dict(common.load_model(tmp_path / "after")[0].named_parameters())
    largest = max(p.grad.abs().max().item() for p in model.parameters())
    for name, p in model.named_parameters():
        assert torch.allclose((p - after[name]) / rate, p.grad, rtol=1e-3, atol=1e-3 * largest), name


def test_zero_shot_along_training(tmp_path):
    """Fig. 7: a set with classes and no captions gives top-1 by prompts in the log, the summary and the picture."""
    for split, numbers in (("train", range(12)), ("val", range(12, 21)), ("test", range(21, 30))):
        for c, name in enumerate(("apple", "pear_tree", "zebra")):
            write_images(tmp_path / "classes" / split / name, [i for i in numbers if i % 3 == c])
    name = str(tmp_path / "classes")
    summary = run_script(temo, tmp_path / "r", *QUICK, "--eval-every", 1, "--image-size", 24, "--eval-datasets", name,
                         "emoji")
    text = (tmp_path / "r" / "metrics.jsonl").read_text()
    assert text.count('"zero-shot": {"top1"') == 3 and "zero-shot" not in summary["test"]["emoji"]  # steps 0, 1, 2
    model, tokenizer, transform = common.load_model(tmp_path / "r")
    with torch.no_grad():
        images = torch.cat([model(transform(torch.from_numpy(picture(i)).permute(2, 0, 1))[None])[0]
                            for i in range(21, 30)])
        classes = model(tokens=tokenizer([f"a photo of a {c}." for c in ("apple", "pear tree", "zebra")]))[1]
    right = (F.normalize(images) @ F.normalize(classes).T).argmax(1) == torch.arange(21, 30) % 3
    assert summary["test"][name]["zero-shot"]["top1"] == pytest.approx(100 * right.float().mean().item())


def test_the_threshold_of_figures_4_and_5():
    """The first cosine above the negatives' mode where positives are denser; none if the two are alike."""
    image, noise = unit(300, 64, seed=1), unit(300, 64, seed=2)
    pieces = {"image": image, "text": F.normalize(image + noise), "owner": list(range(300)),
              "positives": torch.arange(300)[:, None]}                     # cosines of pairs about 0.7, of others 0
    found = figures.base.similarity_histograms(pieces)
    negative = (F.normalize(image + noise) @ image.T)[~torch.eye(300, dtype=bool)]
    assert negative.quantile(0.97).item() < found["threshold"] < 0.65
    low = next(k for k, edge in enumerate(found["edges"]) if edge == found["threshold"])
    assert found["positive"][low] > found["negative"][low] and found["positive"][low - 1] <= found["negative"][low - 1]
    assert figures.base.similarity_histograms(pieces | {"text": -image})["threshold"] is None


def test_a_fork_s_temperature_is_that_of_figure_2(tmp_path, monkeypatch):
    """Its modulated_temperature serves the loss, the columns of the log and what is drawn from them."""
    flags = [*QUICK, *"--eval-every 0 --dataset moving-emoji --clips 32 16 16".split()]
    own = fork(temo, tmp_path, "return tau_min + tau_alpha * ((1 + sim) / 2).clamp(min=1e-8).sqrt()",
               "return tau_min + tau_alpha + 0 * sim")
    own = fork(own, tmp_path, 'return numbers | {"tau_pos"', 'return numbers | {"mine": 7.0, "tau_pos"')
    drawn = []
    monkeypatch.setattr(figures.base, "save_figure", lambda *args: drawn.append(args))
    run_script(own, tmp_path / "fork", *flags, pictures=True)
    theirs, ours = steps(tmp_path / "fork"), few_steps(temo, tmp_path / "ours", *flags)
    lines = {line.get_label(): list(line.get_ydata()) for line in panel(drawn, "(Fig. 2)").lines}
    assert lines == {f"{name} pairs": [row[f"tau_{name[:3]}"] for row in theirs] for name in ("positive", "negative")}
    assert list(panel(drawn, "mine").lines[0].get_ydata()) == [7, 7]           # a column of its own has a panel
    assert all(row[k] == pytest.approx(0.15, abs=1e-6) for row in theirs for k in ("tau_pos", "tau_neg"))
    assert all(0.05 <= row["tau_neg"] < 0.149 for row in ours)
    assert theirs[0]["L_M-MM"] != pytest.approx(ours[0]["L_M-MM"], rel=1e-3)


def test_the_bar_shows_a_loss_that_does_not_climb_by_its_weights(tmp_path, capsys):
    run_script(temo, tmp_path / "r", *QUICK, "--image-size", 16, "--eval-every", 0)
    last, said = steps(tmp_path / "r")[-1], capsys.readouterr()
    assert f"L_MM={last['L_MM']:.3f}" in said.err and f"loss={last['loss']:.3f}" not in said.err
    assert "random guess loss 2.773 at the start, 8.318 at the end" in said.out  # of the sum
