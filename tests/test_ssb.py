"""NCL on SSB: the captioning loss against a plain loop, the own video left out, SSB's encoders,
whole runs."""

import math

import common
from contrastive.encoders.ssb import Captioner, set_dropout
from contrastive.encoders.texts import Tokenizer

import numpy as np
import pytest
import torch
import transformers as T
from safetensors.torch import load_file

from helpers import (
    refused, run_script, steps, unit, write_rows)
from variants import ncl_ssb
from variants.ncl_ssb import captioning_loss, support_summary

D, V = 16, 3  # embedding width, videos


@pytest.fixture(scope="module")
def root(tmp_path_factory, tiny):
    """A tiny T5 with its tokenizer, and 40 clips of two captions: motion (time, 6) and appearance
    (time, 4), other
    times."""
    root, rng = tmp_path_factory.mktemp("ssb"), np.random.default_rng(0)
    for name, width in (("motion", 6), ("appearance", 4)):
        (root / name).mkdir()
        for i in range(40):
            np.save(
                root / name / f"clip{i}.npy", rng.normal(size=(3 + i % 9, width)).astype(np.float32)
            )
    captions = [
        (f"clip{i}", f"{w} number {i}") for i in range(40) for w in ("one", "yet another of them,")
    ]
    write_rows(root / "clips.csv", ["video", "caption"], captions)
    (root / "t5").symlink_to(tiny("t5")[0])
    return root


def text_encoder(root, **more):
    return common.TextEncoder(str(root / "t5"), D, pooling="ssb", **more)


def test_the_captioning_loss_is_the_loop(root):
    """Six captions of three videos in float64, each token from the true ones before it; the decoder
    is T5's."""
    captioner = Captioner(text_encoder(root), D).double().eval()
    lengths, video_id, tau = torch.tensor([5, 2, 4, 1, 3, 5]), torch.arange(6) % V, 0.1
    mask = (torch.arange(5) < lengths[:, None]).long()
    ids = torch.randint(3, 20, (6, 5), generator=torch.Generator().manual_seed(0)) * mask
    t, v, nll = unit(6, D), unit(6, D, seed=1), []
    whole = T.T5ForConditionalGeneration.from_pretrained(root / "t5").double().eval()
    for i in range(6):
        support = [j for j in range(6) if video_id[j] != video_id[i]]
        weights = [math.exp((t[i] @ v[j]).item() / tau) for j in support]
        z = sum(w / sum(weights) * v[j] for w, j in zip(weights, support))
        state = (captioner.bridge.weight @ z + captioner.bridge.bias)[None, None]
        words = ids[i, : lengths[i]]
        with torch.no_grad():
            logits = whole(
                encoder_outputs=(state,), decoder_input_ids=torch.tensor([[0, *words[:-1]]])
            ).logits[0]
        nll.append(torch.nn.functional.cross_entropy(logits, words).item())
    got = captioning_loss(
        support_summary(3 * t, 2 * v, video_id, video_id, tau), ids, mask, captioner
    )
    assert got.dtype == torch.float64 and got.item() == pytest.approx(sum(nll) / 6, rel=1e-9)


@pytest.mark.parametrize("first", [True, False], ids=["T5", "T5 1.1"])
def test_the_decoder_comes_back_from_a_checkpoint(root, first):
    """T5 1.1 has output weights of its own, which a resumed run must not share with the words
    either."""
    text = text_encoder(root)
    text.config["scale_decoder_outputs"] = first  # how transformers tells them apart
    trained, again = (Captioner(text, D, pretrained=p).eval() for p in (True, False))
    with torch.no_grad():
        for k, p in enumerate(trained.parameters()):
            p += 0.1 * k
    again.load_state_dict(trained.state_dict())
    z, ids = torch.ones(1, D), torch.tensor([[5, 6, 1]])
    assert torch.equal(trained(z, ids), again(z, ids))
    assert (again.t5.lm_head.weight is again.t5.decoder.embed_tokens.weight) == first


def test_a_batch_of_one_video_has_no_support():
    text = unit(6, D)
    videos = unit(6, D, seed=1).requires_grad_()
    video_id = torch.zeros(6, dtype=torch.long)
    alone = support_summary(text, videos, video_id, video_id)
    (gradient,) = torch.autograd.grad(alone.sum(), videos)
    assert not alone.any() and not gradient.any()


def test_towers(root):
    """A text's embedding does not depend on the padding of its batch; order matters; --dropout
    drops."""
    tokenizer = Tokenizer(root / "t5", 12)
    torch.manual_seed(0)
    vision = common.VisionEncoder("ssb", D, features=(5, 10))
    model = common.TwoTower(vision, text_encoder(root)).train()
    clip, texts = torch.randn(2, 5, 10), ["one number 3", "yet another of them, number 3"]
    tokens = tokenizer(texts)
    set_dropout(model, 0.0, text=False)
    video, both, features = model(clip, tokens)
    assert video.shape == both.shape == (2, D) and torch.equal(features, video)
    assert torch.allclose(model(tokens=tokenizer(texts[:1]))[1], both[:1], atol=1e-6)
    assert not torch.allclose(model(clip.flip(1))[0], video, atol=1e-3)
    set_dropout(model, 0.5, text=False)
    assert not torch.equal(model(clip)[0], video) and not torch.equal(model(tokens=tokens)[1], both)
    for dropout in (True, False):
        captioner = Captioner(model.text, D, dropout=dropout).train()
        a, b = (captioner(torch.ones(2, D), tokens["input_ids"]) for _ in range(2))
        assert torch.equal(a, b) != dropout


def flags(root, *more):
    towers = ["--dataset", root / "clips.csv", "--text-encoder", root / "t5"]
    towers += ["--feature-dir", root / "motion", root / "appearance"]
    rest = (
        f"--cpu --workers 0 --text-length 12 --embed-dim {D} --frames 5 "
        "--batch-size 8 --max-steps 4 --log-every 1 --save-every 2 "
        "--queue-size 40 --unfold-captions"
    )
    return [str(flag) for flag in (*towers, *rest.split(), *more)]


def test_a_model_is_saved_without_the_decoder(root, tmp_path, capsys):
    folder = tmp_path / "r"
    run_script(ncl_ssb, folder, *flags(root, "--lr", "1e-2"))
    log = steps(folder)
    assert "own (reconstruction)" in capsys.readouterr().out  # values of no paper
    for row in log:
        expected = 15 * (row["L_t2v"] + row["L_v2t"]) / 2 + 10 * row["L_cap"]
        assert row["loss"] == pytest.approx(expected, rel=1e-5)
    assert log[-1]["L_cap"] < log[0]["L_cap"]
    names = load_file(folder / "model.safetensors").keys()
    assert not [n for n in names if "decoder" in n or "captioner" in n]
    assert "text.head.conv.weight" in names


def test_the_margin_loss_has_no_biases_at_a_temperature_that_nothing_trained(root, tmp_path):
    """SSB itself, in the log, the result and the pictures."""
    folder = tmp_path / "r"
    summary = run_script(ncl_ssb, folder, *flags(root, "--baseline", "--loss-scale", 2))
    (metrics,) = summary["test"].values()
    assert "R-Mean" in metrics and not {"normalize", "normalized_by"} & metrics.keys()
    for row in steps(folder):
        assert not {"error", "tau"} & row.keys()
        expected = 2 * (row["L_t2v"] + row["L_v2t"]) + 10 * row["L_cap"]
        assert row["loss"] == pytest.approx(expected, rel=1e-5)


def test_recipe_of_ssb(tmp_path):
    """App. C, and what is recalled of SSB; the captioning loss stays beside NCL's."""
    for name, loss, scale, *expected in (
        ("msrvtt", "ncl", 15, 20, 32, 100, 0.1),
        ("msvd", "infonce", 15, 20, 64, 100, 0.1),
        ("activitynet", "max-margin", 64, 28, 512, 256, 0),
    ):
        words = ["--feature-dir", str(tmp_path), "--dataset", name]
        if loss == "max-margin":
            words += ["--baseline"]
        else:
            words += ["--loss", loss]
        args = ncl_ssb.parse_args(words)
        assert [args.epochs, args.frames, args.text_length, args.dropout] == expected
        assert args.text_dropout == (args.dropout > 0) and args.loss_scale == scale
        assert (args.loss, args.image_encoder) == (loss, "ssb")
        assert (args.text_encoder, args.text_pooling, args.embed_dim) == (
            "google-t5/t5-base",
            "ssb",
            1024,
        )
        assert (args.optimizer, args.lr, args.batch_size, args.grad_clip) == ("adam", 5e-5, 64, 0.2)
        assert (args.tau, args.captioning_weight, args.support_tau) == (0.07, 10, 0.1)
        assert args.queue_size == 16_384 and args.chunk_size == 0
        assert args.normalize == ("none" if loss == "max-margin" else "queue")


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "--feature-dir: SSB reads features"),
        (["--feature-dir", "."] + "--loss max-margin".split(), "trains no temperature"),
        (["--feature-dir", "."] + "--baseline --tau 0.1".split(), "--tau: only with --loss ncl"),
        (["--feature-dir", "."] + "--margin 0.1".split(), "--margin: only with --loss max-margin"),
        (["--feature-dir", "."] + "--eval-datasets msvd".split(), "are those of msrvtt alone"),
    ],
)
def test_flags_without_effect_are_refused(words, message, capsys):
    assert message in refused(ncl_ssb.parse_args, words, capsys)


def test_dropout_of_t5_stays_or_goes(root):
    model = common.TwoTower(common.VisionEncoder("ssb", D, features=(5, 10)), text_encoder(root))
    tokens = Tokenizer(root / "t5", 12)(["red apple", "a blue bird"])

    def differ(*modes):
        a, b = (model.train(mode)(tokens=tokens)[1] for mode in modes)
        return not torch.equal(a, b)

    set_dropout(model, 0.0)
    assert differ(True, True) and not differ(False, False)  # its own
    set_dropout(model, 0.0, text=False)
    assert not differ(True, False)
