"""NCL on SSB: the captioning loss against a loop, the support set, SSB's encoders and runs."""

import math

import common
from contrastive.encoders.ssb import Captioner, set_dropout
from contrastive.encoders.texts import Tokenizer

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

from helpers import assert_close, refused, run_script, steps, unit, write_rows
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
def support_by_hand(text, videos, video_id, tau, i):
    """The mean of the other videos' embeddings by exp(cosine / tau)."""
    total = 0.0
    summary = torch.zeros(D).double()
    for j in range(len(videos)):
        if video_id[j] != video_id[i]:
            weight = math.exp((text[i] @ videos[j]).item() / tau)
            total += weight
            summary += weight * videos[j]
    return summary / total


def test_a_summary_is_of_the_other_videos_that_is_the_loop():
    text = unit(6, D)
    videos = unit(6, D, seed=1)
    video_id = torch.arange(6) % 3
    summary = support_summary(3 * text, 2 * videos, video_id, video_id, 0.1)
    for i in range(6):
        assert_close(summary[i], support_by_hand(text, videos, video_id, 0.1, i), 1e-12)


def test_a_batch_of_one_video_has_no_support():
    videos = unit(6, D, seed=1).requires_grad_()
    video_id = torch.zeros(6, dtype=torch.long)
    summary = support_summary(unit(6, D), videos, video_id, video_id)
    (gradient,) = torch.autograd.grad(summary.sum(), videos)
    assert not summary.any()
    assert not gradient.any()


def test_the_captioning_loss_is_the_loop(t5, text_encoder):
    """Each token from the true ones before it, by T5's decoder."""
    captioner = Captioner(text_encoder, D).double().eval()
    whole = transformers.T5ForConditionalGeneration.from_pretrained(t5).double().eval()
    lengths = torch.tensor([5, 2, 1])
    z = unit(3, D)
    mask = (torch.arange(5) < lengths[:, None]).long()
    ids = torch.randint(3, 20, (3, 5)) * mask
    total = 0.0
    for i in range(3):
        state = captioner.bridge(z[i])[None, None]
        caption = ids[i, :lengths[i]]
        before = torch.tensor([[0, *caption[:-1]]])
        logits = whole(encoder_outputs=(state,), decoder_input_ids=before).logits[0]
        total += F.cross_entropy(logits, caption).item()
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
    z = torch.ones(1, D)
    ids = torch.tensor([[5, 6, 1]])
    assert torch.equal(trained(z, ids), resumed(z, ids))
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


def is_random(encode):
    return not torch.equal(encode(), encode())


@pytest.mark.parametrize("dropout, text_dropout, random_towers", [
    (0.5, False, [True, True]),  # the text head drops
    (0.0, True, [False, True]),
    (0.0, False, [False, False]),
])
def test_dropout_of_the_towers(model, t5, dropout, text_dropout, random_towers):
    clip = torch.randn(2, 5, 10)
    tokens = Tokenizer(t5, 12)(["red apple", "a blue bird"])
    set_dropout(model.train(), dropout, text=text_dropout)
    video = lambda: model(clip)[0]
    text = lambda: model(tokens=tokens)[1]
    assert [is_random(video), is_random(text)] == random_towers


@pytest.mark.parametrize("dropout", [True, False])
def test_dropout_of_the_captioner(text_encoder, dropout):
    captioner = Captioner(text_encoder, D, dropout=dropout).train()
    z = torch.ones(1, D)
    ids = torch.tensor([[5, 6, 1]])
    assert is_random(lambda: captioner(z, ids)) == dropout


# --------------------------------------------- runs ------------------------------------------
@pytest.fixture(scope="module")
def flags(tmp_path_factory, tiny):
    """A small run on 40 clips of features of two widths and other lengths, two captions each."""
    root = tmp_path_factory.mktemp("ssb")
    draws = np.random.default_rng(0)
    rows = []
    for i in range(40):
        for name, width in (("motion", 6), ("appearance", 4)):
            (root / name).mkdir(exist_ok=True)
            feature = draws.normal(size=(3 + i % 9, width)).astype(np.float32)
            np.save(root / name / f"clip{i}.npy", feature)
        rows.append((f"clip{i}", f"one number {i}"))
        rows.append((f"clip{i}", f"yet another of them, {i}"))
    table = write_rows(root / "clips.csv", ["video", "caption"], rows)
    words = (
        f"--dataset {table} --text-encoder {tiny('t5')[0]} --feature-dir {root / 'motion'} "
        f"{root / 'appearance'} --cpu --workers 0 --text-length 12 --embed-dim {D} --frames 5 "
        "--batch-size 8 --max-steps 4 --log-every 1 --queue-size 40 --unfold-captions")
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


@pytest.mark.parametrize("dataset, flags, expected", [
    ("msrvtt", "", {"loss": "ncl", "loss_scale": 15, "epochs": 20, "frames": 32, "dropout": 0.1}),
    ("msvd", "--loss infonce", {"loss_scale": 15, "frames": 64, "text_length": 100}),
    ("activitynet", "--baseline", {
        "loss": "max-margin", "loss_scale": 64, "normalize": "none", "epochs": 28, "frames": 512,
        "text_length": 256, "dropout": 0, "text_dropout": False}),
])
def test_recipe_of_ssb(dataset, flags, expected):
    """App. C, and what is recalled of SSB; the captioning loss stays beside NCL's."""
    words = f"--feature-dir . --dataset {dataset} {flags}"
    args = vars(ncl_ssb.parse_args(words.split()))
    expected = expected | {
        "text_encoder": "google-t5/t5-base", "embed_dim": 1024, "optimizer": "adam", "lr": 5e-5,
        "batch_size": 64, "grad_clip": 0.2, "tau": 0.07, "captioning_weight": 10,
        "queue_size": 16_384}
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
