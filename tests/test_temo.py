"""TeMo's equations against loops written from the paper, in float64, the limiting cases, and its recipes."""

import json
import math
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import common
from contrastive import encoders, engine, figures

import pytest
import torch
import torch.nn.functional as F

import temo
import temperature_schedules
from helpers import fork, panel, picture, run_script, steps, unit, write_images

N, D = 6, 5


def loop_info_nce(anchor, candidates, tau):
    """Eq. 1, averaged: plain Python over floats; tau(i, k) -> float."""
    total = 0.0
    for i in range(len(anchor)):
        logits = [float(anchor[i] @ candidates[k]) / tau(i, k) for k in range(len(candidates))]
        total += -logits[i] + math.log(sum(math.exp(l) for l in logits))
    return total / len(anchor)


def loop_tau(a, b, tau_min, tau_alpha):
    return lambda i, k: tau_min + tau_alpha * math.sqrt(max(float(a[i] @ b[k]), 0.0))


def loop_temo(image, text, image_aug, text_aug, t, tau, tau_min, tau_alpha):
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
    scaled = [3.0 * v.float() for v in views]  # embeddings are normalised inside; fp32
    assert temo.temo_loss(*scaled, progress, tau, tau_min, tau_alpha).item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_temo_loss_at_cosines_minus_one_zero_and_one(progress):
    image = torch.eye(4, dtype=torch.float64)
    text = torch.stack([image[0], -image[1], image[3], image[2]])  # cosines 1, -1, 0, 0 on the diagonal
    views = [image, text, image.clone(), -text]
    leaves = [v.clone().requires_grad_() for v in views]
    for detach in (True, False):
        loss = temo.temo_loss(*leaves, progress, detach=detach)
        assert loss.item() == pytest.approx(loop_temo(*views, progress, 0.01, 0.01, 0.04), rel=1e-3)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        assert all(torch.isfinite(g).all() for g in grads if g is not None)


def test_modulated_temperature():
    sim = torch.tensor([-1.0, -1e-3, 0.0, 1e-12, 0.25, 1.0], dtype=torch.float64, requires_grad=True)
    tau = temo.modulated_temperature(sim, 0.01, 0.04)
    assert tau[:3].tolist() == [0.01] * 3
    assert tau[4:].tolist() == pytest.approx([0.03, 0.05])
    gradient, = torch.autograd.grad(tau.sum(), sim)
    assert torch.isfinite(gradient).all() and gradient[:3].abs().sum() == 0
    assert gradient[4].item() == pytest.approx(0.04 * 0.5 / 0.5)


def test_limits():
    image, text, image_aug, text_aug = (unit(N, D, seed=s) for s in range(4))
    plain = temo.multimodal_loss(image, text, 0.01)
    assert temo.temo_loss(image, text, image_aug, text_aug, 0.0) == plain  # t = 0: L_MM alone
    assert torch.isclose(temo.modulated_multimodal_loss(image, text, 0.01, 0.0), plain)  # tau_alpha = 0: InfoNCE
    expected = plain + temo.info_nce(image, image_aug, 0.01) + temo.info_nce(text, text_aug, 0.01)
    at_the_end = temo.temo_loss(image, text, image_aug, text_aug, 1.0, tau_alpha=0.0)  # t = 1: three terms, weight 1
    assert torch.isclose(at_the_end, expected)
    same = unit(1, D).expand(N, D)
    assert temo.info_nce(same, same, 0.07).item() == pytest.approx(math.log(N))  # a random guess


def test_temperature_shapes_and_transpose():
    a, b = unit(N, D, seed=1), unit(N, D, seed=2)
    per_anchor, per_pair = torch.rand(N, dtype=torch.float64) + 0.1, torch.rand(N, N, dtype=torch.float64) + 0.1
    expected = loop_info_nce(a, b, lambda i, k: float(per_anchor[i]))
    assert temo.info_nce(a, b, per_anchor).item() == pytest.approx(expected)
    expected = loop_info_nce(a, b, lambda i, k: float(per_pair[i, k]))
    assert temo.info_nce(a, b, per_pair).item() == pytest.approx(expected)
    matrix = temo.modulated_temperature(a @ b.T)
    expected = (temo.info_nce(a, b, matrix) + temo.info_nce(b, a, matrix.T)) / 2  # T_T2I = T_I2T^T
    assert torch.isclose(temo.modulated_multimodal_loss(a, b, 0.01, 0.04), expected)


def test_detach_changes_the_gradient_not_the_loss():
    a, b = unit(N, D, seed=1).requires_grad_(), unit(N, D, seed=2)
    kept, free = (temo.modulated_loss(a, b, 0.01, 0.04, detach=d) for d in (True, False))
    assert kept == free
    g_kept, g_free = (torch.autograd.grad(l, a)[0] for l in (kept, free))
    assert not torch.allclose(g_kept, g_free)
    s = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)  # facts: 33.3 against 22.2 there
    assert torch.autograd.grad(s / temo.modulated_temperature(s), s)[0].item() == pytest.approx(22.2, abs=0.1)
    assert (1 / temo.modulated_temperature(s)).item() == pytest.approx(33.3, abs=0.1)


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


def test_experts_replace_the_unimodal_temperature():
    views = [unit(N, D, seed=s) for s in range(4)]
    tau = torch.rand(N, N, dtype=torch.float64) + 0.05
    got = temo.temo_loss(*views, 1.0, image_tau=tau)
    image_term = temo.info_nce(views[0], views[2], tau)
    text_term = temo.modulated_loss(views[1], views[3], 0.01, 0.04)
    expected = temo.modulated_multimodal_loss(*views[:2], 0.01, 0.04) + image_term + text_term
    assert torch.isclose(got, expected)


@pytest.mark.parametrize("block", [0, 1, 4])
def test_experts_set_the_multimodal_temperature(block):
    """App. F: cosines among I (or T) by the expert; both directions of L_M-MM take them, and nothing else does."""
    image, text, *others = (unit(N, D, seed=s) for s in range(4))
    feature = unit(N, 3, seed=9)
    tau = temo.expert_temperature(feature, feature, 0.01, 0.04)
    of_pair = loop_tau(feature, feature, 0.01, 0.04)
    assert tau.diagonal().tolist() == pytest.approx([0.05] * N) and torch.allclose(tau, tau.T)
    expected = (loop_info_nce(image, text, of_pair) + loop_info_nce(text, image, of_pair)) / 2
    terms = temo.temo_terms(image, text, *others, multimodal_tau=tau, block=block)
    assert terms["L_M-MM"].item() == pytest.approx(expected, rel=1e-9)
    plain = temo.temo_terms(image, text, *others)
    assert all(torch.isclose(terms[k], plain[k]) for k in ("L_MM", "L_M-I2I", "L_M-T2T"))
    row_e = temo.temo_loss(image, text, None, None, 1.0, unimodal="none", multimodal_tau=tau, block=block)
    assert row_e.item() == pytest.approx(expected, rel=1e-9)


def test_what_the_experts_serve():
    expert = ["--text-expert", "a/b"]
    assert temo.parse_args(expert).expert_serves == "multimodal"
    assert temo.parse_args([*expert, "--unimodal", "none"]).unimodal == "none"  # the runs of Tables 9 and 10
    temo.parse_args([*expert, "--no-modulated", "--expert-serves", "unimodal"])
    for flags in (["--no-modulated"], ["--unimodal", "none", "--expert-serves", "unimodal"], ["--loss", "infonce"]):
        with pytest.raises(SystemExit):
            temo.parse_args([*expert, *flags])


# ---------------------------------------------------- baselines ------------------------------------------------------
def test_ts_schedule():
    values = [temo.ts_temperature(p) for p in (0.0, 0.1, 0.2, 0.3, 1.0)]
    assert values == pytest.approx([0.05, 0.01, 0.05, 0.01, 0.05])  # five periods: half a period is 0.1


def test_dystress_temperature():
    s = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0], dtype=torch.float64)
    assert temo.dystress_temperature(s).tolist() == pytest.approx([0.05, 0.03, 0.01, 0.03, 0.05])
    shifted = [0.01 + 0.02 * (1 + math.cos(math.pi * (1 + (1 + x) / 2))) for x in s.tolist()]
    assert temo.dystress_temperature(s, shifted=True).tolist() == pytest.approx(shifted)


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


def test_slip_image_loss_is_nt_xent():
    z1, z2 = unit(N, D, seed=1), unit(N, D, seed=2)
    assert temo.simclr_loss(z1, z2, 0.1) == temperature_schedules.nt_xent(z1, z2, 0.1)


@pytest.mark.parametrize("loss", ["dystress", "dystress-shifted"])
def test_dystress_obeys_detach_tau(loss):
    grads = []
    for detach in (True, False):
        sim = torch.tensor([0.3, -0.4, 0.8], dtype=torch.float64, requires_grad=True)
        grads.append(torch.autograd.grad((sim / temo.pair_temperature(sim, loss, 0.01, 0.05, detach)).sum(), sim)[0])
    assert not torch.allclose(*grads)


# ---------------------------------------------------- recipes and commands ------------------------------------------
def test_cc12m_is_slip_s_model():
    args = temo.parse_args(["--dataset", "cc12m"])
    assert (args.image_encoder, args.text_encoder) == ("vit_base_patch16_224", "openai/clip-vit-base-patch32")
    assert not args.pretrained and not args.clean_captions and (args.embed_dim, args.text_length) == (512, 77)
    assert args.flip == 0 and args.aug_flip == 0.5 and args.tau_clamp == [0.01, 1.0]
    assert (args.lr, args.weight_decay, args.beta2, args.batch_size) == (3e-3, 0.1, 0.98, 4096)
    assert temo.parse_args(["--loss", "slip"]).tau_clamp == [0.01, 1.0]
    assert temo.parse_args(["--dataset", "cc3m"]).tau_clamp == [0.001, 0.5]


@pytest.mark.parametrize("flags, flips", [
    ([], [0.5, 0.5]), (["--dataset", "moving-emoji", "--clips", "130", "8", "8"], [0, 0]), (["--flip", "0"], [0, 0.5]),
    (["--aug-flip", "0.1"], [0.5, 0.1]), (["--loss", "slip", "--flip", "0"], [0, 0.5, 0.5])])
def test_the_views_flip_by_flags_of_their_own(flags, flips, tmp_path, monkeypatch):
    class Views(Exception):
        pass
    def stop(run, views, transform):
        raise Views([v.flip for v in views])
    monkeypatch.setattr(engine.run.Run, "batches", stop)
    with pytest.raises(Views) as found:
        temo.main(temo.parse_args([*flags, "--cpu", "--output-dir", str(tmp_path)]))
    assert found.value.args[0] == flips


PAGES = [Path(temo.__file__).parent / "README.md", *(Path(temo.__file__).parent / "docs").glob("*.md")]
PAGES = "\n".join(page.read_text(encoding="utf8") for page in PAGES)
COMMANDS = re.findall(r"(?:accelerate launch|python|torchrun)[^`\n#]* temo\.py ([^`\n#]*)", temo.__doc__ + PAGES)
COMMANDS = sorted({c for c in COMMANDS if not re.search(r"\$|\\|\.\.\.|--help|--resume|--plan|'", c)})


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_not_refused(command):
    """The flags parse; with --chunk-size the image encoder has no BatchNorm."""
    args = temo.parse_args(shlex.split(command))
    if args.chunk_size:
        with torch.device("meta"):
            model = common.VisionEncoder(args.image_encoder, args.embed_dim, False, args.image_size)
        assert not encoders.base.has_batchnorm(model)


def test_the_commands_say_what_the_paper_did():
    assert any("--chunk-size" in c for c in COMMANDS) and any("--paraphrases" in c for c in COMMANDS)
    table_2 = next(line for line in PAGES.splitlines() if line.startswith("Table 2 of TeMo"))
    assert "vit_base_patch16_224" in table_2 and "--no-pretrained" in table_2


def test_the_paper_s_run_without_its_paraphrases_is_warned_of(tmp_path):
    train = SimpleNamespace(templates=(), streamed=False, first_captions=lambda limit: ["a cat", "a dog", "a cow"])
    lines = [json.dumps({"caption": c, "paraphrases": ["other words"]}) + "\n" for c in train.first_captions(3)]
    for name, some in (("all", lines), ("two", lines[:2])):
        (tmp_path / f"{name}.jsonl").write_text("".join(some))
    full, partial = (common.Paraphrases(tmp_path / f"{name}.jsonl") for name in ("all", "two"))
    for dataset in ("cc3m", "cc12m"):
        assert temo.second_texts(train, None, dataset).startswith("WARNING: NOT THE PAPER'S T~")
        assert temo.second_texts(train, full, dataset) == "paraphrases of 3 captions"
        said = temo.second_texts(train, partial, dataset)
        assert said.startswith("WARNING: paraphrases of 2 captions, but 1 of the first 3 training captions have none")
    assert not any("WARNING" in temo.second_texts(train, None, d) for d in ("emoji", "captions.csv"))


QUICK = "--cpu --workers 0 --max-steps 2 --batch-size 16 --log-every 1".split()


def test_zero_shot_along_training(tmp_path, monkeypatch, pictures):
    """Fig. 7: a set with classes and no captions gives top-1 by class names in the log, the summary and the picture."""
    for split, numbers in (("train", range(12)), ("val", range(12, 21)), ("test", range(21, 30))):
        for c, name in enumerate(("apple", "pear_tree", "zebra")):
            write_images(tmp_path / "classes" / split / name, [i for i in numbers if i % 3 == c])
    panels, draw = [], figures.temo.draw_curves
    def drawn(log, these, *args, **options):
        panels.extend(these)
        draw(log, these, *args, **options)
    monkeypatch.setattr(figures.temo, "draw_curves", drawn)
    name = str(tmp_path / "classes")
    summary = run_script(temo, tmp_path / "r", *QUICK, "--eval-every", 1, "--image-size", 24, "--eval-datasets", name,
                         "emoji", pictures=True)
    text = (tmp_path / "r" / "metrics.jsonl").read_text()
    assert text.count('"zero-shot": {"top1"') == 3 and "zero-shot" not in summary["test"]["emoji"]  # steps 0, 1, 2
    model, tokenizer, transform = common.load_model(tmp_path / "r")
    with torch.no_grad():
        images = torch.cat([model(transform(torch.from_numpy(picture(i)).permute(2, 0, 1))[None])[0]
                            for i in range(21, 30)])
        classes = model(tokens=tokenizer(["apple", "pear tree", "zebra"]))[1]
    right = (F.normalize(images) @ F.normalize(classes).T).argmax(1) == torch.arange(21, 30) % 3
    assert summary["test"][name]["zero-shot"]["top1"] == pytest.approx(100 * right.float().mean().item())
    titles = [p[0] for p in panels]
    assert titles.count("zero-shot by class names, val (Fig. 7)") == 1 and "retrieval, val" in titles


def test_a_fork_s_temperature_is_that_of_figure_2(tmp_path, monkeypatch, pictures):
    """Its modulated_temperature serves the loss, the columns of the log and what is drawn from them."""
    flags = [*QUICK, *"--eval-every 0 --dataset moving-emoji --clips 32 16 16".split()]
    own = fork(temo, tmp_path, "return tau_min + tau_alpha * torch.where(alike, root, torch.zeros_like(sim))",
               "return tau_min + tau_alpha + 0 * sim")
    found = {}
    for name, script in (("ours", temo), ("fork", own)):
        drawn = []
        monkeypatch.setattr(figures.base, "save_figure", lambda *args, drawn=drawn: drawn.append(args))
        run_script(script, tmp_path / name, *flags, pictures=True)
        log = {k: [row[k] for row in steps(tmp_path / name)] for k in ("tau_pos", "tau_neg", "L_M-MM")}
        lines = {line.get_label(): list(line.get_ydata()) for line in panel(drawn, "(Fig. 2)").lines}
        assert lines == {"positive pairs": log["tau_pos"], "negative pairs": log["tau_neg"]}
        found[name] = log
    assert all(found["fork"][k] == pytest.approx([0.15, 0.15], abs=1e-6) for k in ("tau_pos", "tau_neg"))
    assert all(0.05 <= tau < 0.149 for k in ("tau_pos", "tau_neg") for tau in found["ours"][k])
    assert found["fork"]["L_M-MM"][0] != pytest.approx(found["ours"]["L_M-MM"][0], rel=1e-3)
