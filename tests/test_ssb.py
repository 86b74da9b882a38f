"""NCL on SSB: the captioning loss against a loop, the support set, SSB's encoders and runs."""

import math

import common
from contrastive.encoders.ssb import Captioner, set_dropout
from contrastive.encoders.texts import Tokenizer

import pytest
import torch
import transformers
from safetensors.torch import load_file

from helpers import assert_close, refused, run_script, steps, unit, write_clip_features
from variants import ncl_ssb
from variants.ncl_ssb import captioning_loss, support_summary

D = 16  # width of the embeddings


@pytest.fixture
def t5(tiny):
    folder, _ = tiny("t5")
    return folder


@pytest.fixture
def text_encoder(t5):
    return common.TextEncoder(t5, D, pooling="ssb")


@pytest.fixture
def model(text_encoder):
    torch.manual_seed(0)
    return common.TwoTower(common.VisionEncoder("ssb", D, features=(5, 10)), text_encoder)


# ----------------------------------------- captioning ----------------------------------------
def test_a_summary_is_of_the_other_videos_that_is_the_loop():
    """Their mean by exp(cosine / tau)."""
    text = unit(6, D)
    videos = unit(6, D, seed=1)
    video_id = torch.arange(6) % 3
    summary = support_summary(3 * text, 2 * videos, video_id, video_id, 0.1)
    for i in range(6):
        total = 0.0
        expected = torch.zeros(D).double()
        for j in range(6):
            if j % 3 != i % 3:
                weight = math.exp((text[i] @ videos[j]).item() / 0.1)
                total += weight
                expected += weight * videos[j]
        assert_close(summary[i], expected / total, 1e-12)


def test_a_batch_of_one_video_has_no_support():
    videos = unit(6, D, seed=1).requires_grad_()
    video_id = torch.zeros(6, dtype=torch.long)
    summary = support_summary(unit(6, D), videos, video_id, video_id)
    (gradient,) = torch.autograd.grad(summary.sum(), videos)
    assert not summary.any()
    assert not gradient.any()


def test_the_captioning_loss_is_the_loop(t5, text_encoder):
    """The mean over captions of the loss of a whole T5."""
    captioner = Captioner(text_encoder, D).double().eval()
    whole = transformers.T5ForConditionalGeneration.from_pretrained(t5).double().eval()
    whole.config.decoder_start_token_id = 0
    lengths = torch.tensor([5, 2, 1])
    z = unit(3, D)
    mask = (torch.arange(5) < lengths[:, None]).long()
    ids = torch.randint(3, 20, (3, 5)) * mask
    total = 0.0
    for i in range(3):
        state = captioner.bridge(z[i])[None, None]
        caption = ids[i:i + 1, :lengths[i]]
        total += whole(encoder_outputs=(state,), labels=caption).loss.item()
    loss = captioning_loss(z, ids, mask, captioner)
    assert loss.item() == pytest.approx(total / 3, rel=1e-9)


@pytest.mark.parametrize("is_shared", [True, False], ids=["T5", "T5 1.1"])
def test_the_decoder_comes_back_from_a_checkpoint(text_encoder, is_shared):
    """T5 1.1 has output weights of its own, which are not those of the words."""
    text_encoder.config["scale_decoder_outputs"] = is_shared  # how transformers tells them apart
    trained = Captioner(text_encoder, D).eval()
    for k, p in enumerate(trained.parameters()):
        p.data += 0.1 * k
    resumed = Captioner(text_encoder, D, pretrained=False).eval()
    resumed.load_state_dict(trained.state_dict())
    inputs = torch.ones(1, D), torch.tensor([[5, 6, 1]])
    assert torch.equal(trained(*inputs), resumed(*inputs))
    words = resumed.t5.decoder.embed_tokens.weight
    assert (resumed.t5.lm_head.weight is words) == is_shared


# ------------------------------------------- encoders ----------------------------------------
def test_towers_read_the_order_of_frames_and_no_padding(model, t5):
    model.eval()
    tokenizer = Tokenizer(t5, 12)
    clip = torch.randn(2, 5, 10)
    texts = ["one number 3", "yet another of them, number 3"]
    video, text, features = model(clip, tokenizer(texts))
    assert video.shape == text.shape == (2, D)
    assert torch.equal(features, video)
    assert not torch.allclose(model(clip.flip(1))[0], video, atol=1e-3)
    _, alone, _ = model(tokens=tokenizer(texts[:1]))
    assert_close(alone, text[:1])


@pytest.mark.parametrize("dropout, text_dropout, are_random", [
    (0.5, False, [True, True, False]),  # the text head drops
    (0.0, True, [False, True, True]),
    (0.0, False, [False, False, False]),
])
def test_dropout_is_that_of_the_flags(model, t5, dropout, text_dropout, are_random):
    """Of the video encoder, the text encoder and the captioner."""
    clip = torch.randn(2, 5, 10)
    tokens = Tokenizer(t5, 12)(["red apple", "a blue bird"])
    set_dropout(model.train(), dropout, text=text_dropout)
    captioner = Captioner(model.text, D, dropout=text_dropout).train()
    outputs = []
    for _ in range(2):
        logits = captioner(torch.ones(2, D), tokens["input_ids"])
        outputs.append([*model(clip, tokens)[:2], logits])
    for first, second, is_random in zip(*outputs, are_random, strict=True):
        assert torch.equal(first, second) != is_random


# --------------------------------------------- runs ------------------------------------------
@pytest.fixture
def flags(tmp_path, tiny):
    files = write_clip_features(tmp_path / "data")
    words = (
        "--dataset {clips} --feature-dir {motion} {appearance} --frames 5 --queue-size 40 "
        "--unfold-captions --text-length 12 --cpu --workers 0 --batch-size 8 --max-steps 4 "
        f"--log-every 1 --embed-dim {D} --text-encoder {tiny('t5')[0]}").format(**files)
    return words.split()


def test_a_run_trains_both_losses_and_leaves_the_decoder_out(flags, tmp_path):
    run_script(ncl_ssb, tmp_path / "run", *flags, "--lr", "1e-2")
    log = steps(tmp_path / "run")
    for row in log:
        expected = 15 * (row["L_t2v"] + row["L_v2t"]) / 2 + 10 * row["L_cap"]
        assert row["loss"] == pytest.approx(expected, rel=1e-5)
    assert log[-1]["L_cap"] < log[0]["L_cap"]
    names = " ".join(load_file(tmp_path / "run" / "model.safetensors"))
    assert "text.head.conv.weight" in names
    assert "decoder" not in names
    assert "captioner" not in names


def test_ssb_itself_has_no_temperature_and_no_biases(flags, tmp_path):
    summary = run_script(
        ncl_ssb, tmp_path / "run", *flags, "--baseline", "--loss-scale", "2")
    (metrics,) = summary["test"].values()
    assert not {"normalize", "normalized_by"} & metrics.keys()
    for row in steps(tmp_path / "run"):
        assert not {"error", "tau"} & row.keys()
        expected = 2 * (row["L_t2v"] + row["L_v2t"]) + 10 * row["L_cap"]
        assert row["loss"] == pytest.approx(expected, rel=1e-5)


RECIPE = dict(
    text_encoder="google-t5/t5-base", embed_dim=1024, optimizer="adam", lr=5e-5, batch_size=64,
    grad_clip=0.2, tau=0.07, captioning_weight=10, queue_size=16_384)


@pytest.mark.parametrize("flags, expected", [
    ("msrvtt", dict(loss="ncl", loss_scale=15, epochs=20, frames=32, dropout=0.1)),
    ("msvd --loss infonce", dict(loss_scale=15, frames=64, text_length=100)),
    ("activitynet --baseline", dict(
        loss="max-margin", loss_scale=64, normalize="none", epochs=28, frames=512,
        text_length=256, dropout=0, text_dropout=False)),
])
def test_recipe_of_ssb(flags, expected):
    """App. C, and what is recalled of SSB; the captioning loss stays beside NCL's."""
    args = vars(ncl_ssb.parse_args(f"--feature-dir . --dataset {flags}".split()))
    expected = RECIPE | expected
    assert {name: args[name] for name in expected} == expected


@pytest.mark.parametrize("words, message", [
    ("", "--feature-dir: SSB reads features"),
    ("--feature-dir . --loss max-margin", "trains no temperature"),
    ("--feature-dir . --baseline --tau 0.1", "--tau: only with --loss ncl"),
    ("--feature-dir . --margin 0.1", "--margin: only with --loss max-margin"),
    ("--feature-dir . --eval-datasets msvd", "are those of msrvtt alone"),
])
def test_flags_without_effect_are_refused(words, message, capsys):
    assert message in refused(ncl_ssb.parse_args, words.split(), capsys)
