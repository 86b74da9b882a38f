"""VAST: each part against a computation by hand in float64, its released names, its pairs, and
whole runs of variants/mmts_vast.py."""

import math
import re
import shutil
from types import SimpleNamespace

import common
from contrastive.core.processes import UserError
from contrastive.data.batches import RawBatches
from contrastive.data.sound import SLICE_LENGTH, filter_bank, read_sound, sound_slice
from contrastive.encoders import vast
from contrastive.encoders.models import model_of_spec
from contrastive.encoders.texts import Tokenizer, train_wordpiece
from contrastive.evaluation import rerank
from contrastive.evaluation.embed import encode_images

import accelerate
import av
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mmts
from helpers import (
    CPU, evaluated, few_steps, frame, open_splits, refused, run_script, tensors_in, unit,
    write_files, write_rows, write_video)
from variants import mmts_vast

D = 24  # width of the embeddings
TEXTS = ["a red apple falls", "the blue bird flies", "one green car"]


@pytest.fixture(scope="module")
def words():
    return Tokenizer(train_wordpiece(TEXTS), 12)


def model_of(words, modalities="vas", weights=""):
    """A vast-small in float64, in eval mode, with its EvalTransform."""
    spec = {
        "image_encoder": "vast-small", "text_encoder": "small", "embed_dim": D, "image_size": 32,
        "text_length": 12, "text_pooling": "mean", "image_stats": "encoder", "eval_resize": "crop",
        "modalities": modalities}  # fmt: skip
    torch.manual_seed(0)
    model, transform = model_of_spec(spec, words, False, weights)
    with torch.no_grad():
        for p in model.parameters():  # zeros and ones would hide a part that is not used
            if p.ndim == 1:
                p += 0.1 * torch.randn(p.shape)
    return model.double().eval(), transform


def clips_of(words, n=3, frames=2):
    """The inputs of n clips in float64."""
    generator = torch.Generator().manual_seed(1)
    draw = {"generator": generator, "dtype": torch.float64}
    return {
        "frames": torch.randn(n, frames, 3, 32, 32, **draw),
        "sound": torch.randn(n, SLICE_LENGTH, 64, **draw),
        "subtitle": vast.subtitle_tokens(words, TEXTS[:n]),
    }


# ------------------------------------------------------- sound -----------------------------------
def kaldi(samples):
    """compute-fbank-feats of Kaldi for one window of 400 samples."""
    x = samples * 2.0**15
    x = x - x.mean()
    x = x - 0.97 * np.concatenate([x[:1], x[:-1]])
    n = np.arange(400)
    x = x * (0.5 - 0.5 * np.cos(2 * np.pi * n / 399)) ** 0.85
    # without Nyquist
    power = [abs((x * np.exp(-2j * np.pi * k * n / 512)).sum()) ** 2 for k in range(256)]

    def mel(f):
        return 1127 * math.log(1 + f / 700)

    low, step, bands = mel(20), (mel(8000) - mel(20)) / 65, []
    for band in range(64):
        left, centre, right = (low + (band + k) * step for k in range(3))
        energy = 0.0
        for k, p in enumerate(power):
            m = mel(k * 16000 / 512)
            energy += p * max(0.0, min((m - left) / step, (right - m) / step))
        bands.append(math.log(max(energy, np.finfo(np.float32).eps)))
    return np.array(bands)


def test_the_filter_bank_is_kaldi_s():
    rng = np.random.default_rng(0)
    samples = 0.1 * np.sin(2 * np.pi * 700 * np.arange(1000) / 16000) + 0.01 * rng.normal(size=1000)
    bank = filter_bank(samples)
    assert bank.shape == (4, 64)  # whole windows of 25 ms every 10 ms
    for window in (0, 3):
        expected = kaldi(samples[160 * window : 160 * window + 400])
        assert np.allclose(bank[window], expected, atol=2e-4)


def test_slices_of_a_sound():
    """10.24 s each, normalised and then padded with zeros; whole slices have an empty one more."""
    rng = np.random.default_rng(0)
    length = 1024 * 160 + 240  # samples of one slice of whole windows
    sound = 0.1 * rng.normal(size=2 * 1024 * 160 + 240)
    bank = (filter_bank(sound) - 15.41663) / (2 * 6.55582)
    assert len(bank) == 2048
    for draw, number in ((0.0, 0), (0.5, 1), (None, 1)):
        got = sound_slice(sound, draw).numpy()
        assert np.allclose(got, bank[1024 * number : 1024 * (number + 1)], atol=1e-5)
    assert not sound_slice(sound, 0.99).any()  # the empty third
    short = sound_slice(sound[: length // 2]).numpy()
    assert np.allclose(short[:511], bank[:511], atol=1e-5) and not short[512:].any()
    assert not sound_slice(None).any() and not sound_slice(sound[:100]).any()


def tone(pitch, seconds, rate=16000):
    return np.sin(2 * np.pi * pitch * np.arange(round(seconds * rate)) / rate).astype(np.float32)


def write_sound(path, channels, rate, codec="pcm_s16le", frames=()):
    """A file of sound, or of video frames with sound."""
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = np.ascontiguousarray((np.stack(channels) * 0.5).astype(np.float32))
    with av.open(str(path), "w") as out:
        layout = "stereo" if len(channels) > 1 else "mono"
        stream = out.add_stream(codec, rate=rate, layout=layout)
        if len(frames):
            video = out.add_stream("libx264", rate=10)
            video.height, video.width = frames[0].shape[:2]
        for k, picture in enumerate(frames):
            shown = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="yuv420p")
            shown.pts = k
            out.mux(video.encode(shown))
        if len(frames):
            out.mux(video.encode(None))
        heard = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
        heard.sample_rate, heard.pts = rate, 0
        encoder = av.AudioResampler(
            format=stream.codec_context.format, layout=layout, rate=rate,
            frame_size=stream.codec_context.frame_size or 1024)  # fmt: skip
        for frame in [*encoder.resample(heard), *encoder.resample(None)]:
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return path


def pitch_of(samples):
    """The loudest frequency in Hz, at 16 kHz."""
    return abs(np.fft.rfft(samples)).argmax() * 16000 / len(samples)


def test_sound_of_files(tmp_path):
    """The first channel at 16 kHz; a window of it; a video without sound has none."""
    two = [np.concatenate([tone(440, 2, 44100), tone(880, 2, 44100)]), tone(3000, 4, 44100)]
    wav = write_sound(tmp_path / "a.wav", two, 44100)
    mp3 = write_sound(tmp_path / "a.mp3", [np.concatenate([tone(440, 2), tone(880, 2)])], 16000,
                      "libmp3lame")  # fmt: skip
    mp4 = write_sound(tmp_path / "a.mp4", two, 44100, "aac", [frame(k) for k in range(40)])
    for file in (wav, mp3, mp4, wav.read_bytes()):
        whole = read_sound(file)
        assert abs(len(whole) - 64000) < 4000 and 0.3 < abs(whole[8000:24000]).max() < 0.7
        assert pitch_of(whole[4000:28000]) == pytest.approx(440, abs=2)
        part = read_sound(file, 2.5, 3.5)
        assert abs(len(part) - 16000) < 200 and pitch_of(part) == pytest.approx(880, abs=2)
    ts = write_sound(tmp_path / "a.ts", two, 44100, "aac", [frame(k) for k in range(40)])
    assert len(read_sound(ts, 0, 1)) == 16000  # whose first second is not 0
    assert read_sound(wav, 9, 10) is None
    assert read_sound(write_video(tmp_path / "b.mp4", range(8))) is None
    with pytest.raises((OSError, ValueError)):
        read_sound(b"not a sound")


# ------------------------------------------------------- data ------------------------------------
def test_youcook2_in_vast_s_layout(tmp_path):
    """[{video_id, desc, subtitle}], audios/ID.wav or .mp3, else the clip's own sound, else none."""
    for k, name in enumerate(("yt1_0_4", "yt1_4_8", "yt2_1_3", "yt3_2_9")):
        write_video(tmp_path / "videos" / f"{name}.mp4", range(8 * k, 8 * k + 8))
    write_sound(tmp_path / "audios" / "yt1_0_4.wav", [tone(440, 3)], 16000)
    write_sound(tmp_path / "audios" / "yt1_4_8.mp3", [tone(880, 3)], 16000, "libmp3lame")
    write_sound(tmp_path / "videos" / "yt2_1_3.mp4", [tone(1760, 3)], 16000, "aac",
                [frame(k) for k in range(8)])  # fmt: skip
    rows = [
        {"video_id": "yt1_0_4", "desc": "chop the onion", "subtitle": "so now chop it"},
        {"video_id": "yt1_4_8", "desc": "fry it", "subtitle": ""},
        {"video_id": "yt2_1_3", "desc": "add salt", "subtitle": "salt goes in"},
        {"video_id": "yt3_2_9", "desc": "stir", "subtitle": "keep going"},
    ]
    write_files(tmp_path, {"descs_cap_train.json": rows, "descs_cap_test.json": rows[:3]})
    write_files(tmp_path, {"youcookii_annotations_trainval.json": {"database": {}}})
    options = {"data_dir": str(tmp_path), "modalities": "vas", "frames": 4, "eval_frames": 6}
    train = common.load_data("youcook2", "train", **options)
    test = common.load_data("youcook2", "test", **options)
    assert (train.read(0).shape[0], test.read(0).shape[0]) == (4, 6)
    assert [train.captions(k)[0] for k in range(4)] == [row["desc"] for row in rows]
    assert "1 without sound, which is zeros" in train.note and "1 without a subtitle" in train.note
    for k, pitch in enumerate((440, 880, 1760)):
        assert pitch_of(train.samples(k)[4000:40000]) == pytest.approx(pitch, abs=2)
        parts = train.sound_and_text(k)
        assert torch.equal(parts["sound"], sound_slice(train.samples(k)))
        assert parts["subtitle"] == rows[k]["subtitle"]
    assert train.samples(3) is None and not train.sound_and_text(3)["sound"].any()
    assert train.available_modalities() == "vas"
    (tmp_path / "youcookii_annotations_trainval.json").unlink()
    only = common.load_data("youcook2", "test", data_dir=str(tmp_path), modalities="v")
    assert len(only) == 3 and only.sound_and_text(0) == {}


def test_own_csv_with_sound_and_subtitles(tmp_path):
    """A column of each; the windows of a video cut its sound, too; a batch has them as tensors."""
    write_video(tmp_path / "a.mp4", range(40))
    write_video(tmp_path / "b.mp4", range(40))
    write_sound(tmp_path / "a.wav", [np.concatenate([tone(440, 2), tone(880, 2)])], 16000)
    table = [
        ("a.mp4", 0.0, 2.0, "one", "a.wav", "first words"),
        ("a.mp4", 2.0, 4.0, "two", "a.wav", "then others"),
        ("b.mp4", 0.0, 4.0, "three", "", ""),
        ("b.mp4", 0.0, 3.0, "four", "lost.wav", ""),
    ]
    header = ["video", "start", "end", "caption", "audio", "subtitle"]
    path = write_rows(tmp_path / "own.csv", header, [(*row, ) for row in table])
    write_rows(path, [*header, "split"], [(*row, "train") for row in table])
    data = open_splits(path, modalities="vas", frames=3)["train"]
    for k, pitch in ((0, 440), (1, 880)):
        assert pitch_of(data.samples(k)) == pytest.approx(pitch, abs=2)
    note = data.note
    assert "1 without sound" in note and "2 without a subtitle" in note
    with pytest.raises(OSError):  # a bad sample
        data.samples(3)
    batches = RawBatches(data, [common.Augment(16, 1.0)], seed=0)
    parts = batches[0, np.array([1, 2])].sound_and_text
    assert parts["subtitle"] == ["then others", ""]
    assert parts["sound"].shape == (2, 1024, 64) and not parts["sound"][1].any()
    assert open_splits(path, frames=3)["train"].sound_and_text(0) == {}
    rows = [(*row[:4], "train") for row in table]
    bare = write_rows(tmp_path / "bare.csv", [*header[:4], "split"], rows)
    note = common.load_data(str(bare), "train", modalities="vas", frames=3).note
    assert "no sound" in note and "no subtitles" in note


def test_each_clip_is_read_with_its_own_sound_and_subtitle(words):
    """In a training batch, and in an evaluation, whose embeddings are those of each clip alone."""
    model, transform = model_of(words)
    model.float()
    options = {"modalities": "vas", "clips": [12, 4, 4], "frames": 2, "image_size": 32}
    data = common.load_data("moving-emoji", "train", **options)
    batches = common.Batches(
        data, [common.Augment(32, 1.0)], transform, 8, 0, first=0, last=1, device=CPU)
    (batch,) = batches
    (inputs,) = batch["views"]
    parts = [data.sound_and_text(row) for row in batch["rows"]]
    subtitles = [part["subtitle"] for part in parts]
    assert torch.equal(inputs["sound"], torch.stack([part["sound"] for part in parts]))
    wanted = vast.subtitle_tokens(words, subtitles)
    assert torch.equal(inputs["subtitle"]["input_ids"], wanted["input_ids"])
    assert len(set(subtitles)) > 4 and len(inputs["sound"].unique(dim=0)) > 4

    embeddings = encode_images(model, data, transform, CPU, batch=5).image
    for row in range(len(data)):
        part = data.sound_and_text(row)
        alone = {
            "frames": transform(data.read(row))[None],
            "sound": part["sound"][None],
            "subtitle": vast.subtitle_tokens(words, [part["subtitle"]]),
        }
        assert torch.allclose(embeddings[row], model(alone)[0][0], atol=1e-4), row


# ------------------------------------------------------- BEATs -----------------------------------
def bucket_by_hand(distance):
    """Of 320: 160 for the keys behind the query; 80 exact ones, then logarithmic ones up to 800."""
    d = abs(distance)
    if d >= 80:
        d = min(159, 80 + int(math.log(d / 80) / math.log(10) * 80))
    return d + 160 * (distance > 0)


def test_beats_is_the_loop():
    """Convolution of positions with a normalised weight, the gate, the bias and the scale of the
    residuals, token by token."""
    size = vast.BeatsSize(width=8, patch_width=6, layers=2, heads=2, groups=2)
    torch.manual_seed(0)
    beats = vast.Beats(size).double().eval()
    with torch.no_grad():
        for p in beats.parameters():
            p += 0.2 * torch.randn(p.shape)
    sound = torch.randn(1, 1024, 64, dtype=torch.float64)
    patches = sound[0].unfold(0, 16, 16).unfold(1, 16, 16).flatten(0, 1)  # (256, 16, 16)
    x = torch.einsum("lij,wij->lw", patches, beats.patch_embedding.weight[:, 0])
    x = beats.post_extract_proj(beats.layer_norm(x))
    conv = beats.pos_conv
    weight = conv.weight_v * conv.weight_g / conv.weight_v.pow(2).sum((0, 1), keepdim=True).sqrt()
    padded, added = F.pad(x, (0, 0, 64, 64)), torch.zeros_like(x)
    for place in range(256):
        for out in range(8):
            group = slice(4 * (out // 4), 4 * (out // 4) + 4)
            window = padded[place : place + 128, group]
            added[place, out] = (window.T * weight[out]).sum() + conv.bias[out]
    x = beats.norm(x + F.gelu(added))
    buckets = torch.tensor([[bucket_by_hand(j - i) for j in range(256)] for i in range(256)])
    for layer in beats.layers:
        attention, heads = layer.self_attn, []
        for h in range(2):
            part = slice(4 * h, 4 * h + 4)
            q, k, v = (getattr(attention, f"{name}_proj")(x)[:, part] for name in ("q", "k", "v"))
            gates = attention.grep_linear(q)  # (256, 8)
            g1, g2 = gates[:, :4].sum(1).sigmoid(), gates[:, 4:].sum(1).sigmoid()
            gate = g1 * (g2 * attention.grep_a[0, h, 0, 0] - 1) + 2
            bias = gate[:, None] * beats.relative_bias.weight[buckets, h]
            heads.append((q @ k.T / 2 + bias).softmax(1) @ v)
        y = attention.out_proj(torch.cat(heads, 1))
        x = layer.self_attn_layer_norm(4**0.25 * x + y)
        x = layer.final_layer_norm(4**0.25 * x + layer.fc2(F.gelu(layer.fc1(x))))
    assert torch.allclose(beats(sound)[0], x, atol=1e-10)
    far = vast.relative_buckets(1000)
    assert [far[0, d].item() for d in (79, 80, 800, 999)] == [239, 240, 319, 319]
    assert far[999, 0] == bucket_by_hand(-999) == 159


# ------------------------------------------------------- embeddings ------------------------------
def test_the_head_reads_the_concatenated_modalities(words):
    """CLS of the frames, all tokens of the sound and CLS of the subtitle; a bias unless alone."""
    inputs = clips_of(words)
    for modalities in vast.MODALITIES:
        model, _ = model_of(words, modalities)
        parts = {}
        frames = [model.vision.body.forward_features(x) for x in inputs["frames"].unbind(1)]
        parts["v"] = (frames[0][:, 0] + frames[1][:, 0]) / 2
        if "a" in modalities:
            parts["a"] = model.audio(inputs["sound"]).mean(1)
        parts["s"] = model.text.states(**inputs["subtitle"])[0][:, 0]
        joined = torch.cat([parts[letter] for letter in modalities], 1)
        expected = joined @ model.clip_head.weight.T
        assert (model.clip_head.bias is None) == (len(modalities) == 1)
        if len(modalities) > 1:
            expected = expected + model.clip_head.bias
        clip, _, features = model(inputs)
        assert torch.allclose(clip, expected) and torch.allclose(features, joined)


def test_a_caption_s_embedding_depends_on_every_word_and_not_on_padding(words):
    """transformers gives a BERT with cross-attention a causal mask, with which CLS sees nothing."""
    model, _ = model_of(words)
    tokens = words([TEXTS[0], "a"])
    embedding = model(tokens=tokens)[1]
    for place in range(1, tokens["attention_mask"][0].sum()):
        ids = tokens["input_ids"].clone()
        ids[0, place] = 7
        if not torch.equal(ids, tokens["input_ids"]):
            other = model(tokens=tokens | {"input_ids": ids})[1]
            assert (other[0] - embedding[0]).abs().max() > 1e-6, place
    assert torch.allclose(model(tokens=words(["a"]))[1][0], embedding[1])


# ------------------------------------------------------- matching --------------------------------
def pairs_of(words, clips, texts, target=None):
    tokens = words(texts)
    clips = torch.tensor(clips)
    target = torch.tensor(target or [0] * len(clips))
    return vast.Pairs(clips, tokens["input_ids"], tokens["attention_mask"], target)


def test_the_matching_head_by_hand(words):
    """Linear, LayerNorm, frame and kind embeddings of each token; all tokens count, padding of the
    subtitle, too; two layers on CLS."""
    model, _ = model_of(words)
    inputs, head = clips_of(words, frames=8), model.matching
    tokens, parts = model.clip_tokens(inputs), []
    for kind, frames in (("vision", 8), ("audio", 1), ("subtitle", 1)):
        x = tokens[kind][1].reshape(frames, -1, tokens[kind].shape[-1])
        for k in range(frames):
            y = F.layer_norm(head.linears[kind](x[k]), (64,), eps=1e-12)
            y = y * head.norms[kind].weight + head.norms[kind].bias + head.kinds[kind][0]
            if kind != "subtitle":  # four frame embeddings, the nearest for each of eight frames
                y = y + head.frames[kind][0, k // 2]
            parts.append(y)
    sequence = torch.cat(parts)[None]
    assert sequence.shape[1] == 8 * 17 + 64 + 70
    words_of_pair = words([TEXTS[2]])
    states = model.text.body(
        words_of_pair["input_ids"], words_of_pair["attention_mask"][:, None, None].bool(),
        encoder_hidden_states=sequence,
    ).last_hidden_state  # fmt: skip
    hidden = F.layer_norm(F.gelu(head.linear1(states[:, 0])), (64,), eps=1e-12)
    expected = head.linear2(hidden * head.layernorm.weight + head.layernorm.bias)
    got = model(inputs, pairs=pairs_of(words, [0, 1], [TEXTS[0], TEXTS[2]]))[2]
    assert torch.allclose(got[1:], expected)
    for place in (0, 8 * 17, 8 * 17 + 64, -1):
        changed = sequence.clone()
        changed[0, place] += 1
        assert not torch.allclose(
            model.match(changed, pairs_of(words, [0], [TEXTS[2]])), expected, atol=1e-9)


def test_negatives_are_drawn_by_their_probability():
    """softmax(sim / tau) + 1e-4 without the own pair, by the inverse of its distribution."""
    sim = unit(4, 6) @ unit(4, 6, seed=1).T
    draws = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    for row in range(4):
        weights = (sim[row] / 0.3).softmax(0) + 1e-4
        weights[row] = 0
        drawn = [mmts_vast.hard_negatives(sim, 0.3, u.expand(4))[row] for u in draws[::20]]
        rows = torch.stack(drawn)
        share = rows.bincount(minlength=4) / len(rows)
        assert share[row] == 0
        assert torch.allclose(share.double(), weights / weights.sum(), atol=2e-3)
    ends = mmts_vast.hard_negatives(sim, 1e-3, torch.tensor([0.0, 0.5, 0.5, 1 - 2**-24]).double())
    assert (ends != torch.arange(4)).all() and ends.max() < 4
    assert mmts_vast.hard_negatives(sim * math.nan, 0.1, torch.zeros(4)).max() < 4


def test_pairs_by_hand(words):
    """Each clip with its caption and a wrong one, each caption with a wrong clip: 3 B, by clip."""
    image, text = unit(3, D).float(), unit(3, D, seed=1).float()
    tokens, draws = words(TEXTS), torch.tensor([[0.1, 0.9], [0.5, 0.4], [0.8, 0.2]]).double()
    pairs = mmts_vast.hard_pairs(image, text, tokens, draws, tau=0.5, length=12)
    sim = image @ text.T
    expected = {(k, k, 1) for k in range(3)}
    for k in range(3):
        for matrix, column in ((sim, 0), (sim.T, 1)):
            others = [j for j in range(3) if j != k]
            p = [math.exp(matrix[k, j] / 0.5) for j in range(3)]
            p = [p[j] / sum(p) + 1e-4 for j in others]
            wrong = others[int(draws[k, column] * sum(p) >= p[0])]
            expected.add((k, wrong, 0) if column == 0 else (wrong, k, 0))
    numbers = {tuple(ids[ids > 0].tolist()): k for k, ids in enumerate(words(TEXTS)["input_ids"])}
    got = [
        (clip.item(), numbers[tuple(ids[mask > 0].tolist())], target.item())
        for clip, ids, mask, target in zip(*pairs)
    ]
    assert len(got) == 9 and set(got) == expected and pairs.clips.tolist() == sorted(pairs.clips)
    part = pairs.of_clips(1, 3)
    assert (part.clips == 0).sum() == (pairs.clips == 1).sum()
    logits = torch.tensor([[1.0, 2.0], [0.5, -1.0]])
    loss = mmts_vast.matching_loss(logits, torch.tensor([1, 0]), num_clips=4)
    by_hand = math.log(1 + math.exp(-1)) + math.log(1 + math.exp(-1.5))
    assert loss.item() == pytest.approx(by_hand / 12)


# ------------------------------------------------------- released weights ------------------------
def released(words):  # noqa: C901, PLR0912
    """A file with the released names at small widths, and what is left out of it."""
    model, _ = model_of(words)
    rng, file = torch.Generator().manual_seed(5), {}

    def put(name, *shape):
        file[f"module.{name}"] = torch.randn(shape, generator=rng)

    for name, x in model.vision.body.state_dict().items():
        put(f"vision_encoder.visual.{name}", *x.shape)
    put("vision_encoder.visual.head.weight", 5, 64)
    put("vision_encoder.text.positional_embedding", 7, 8)
    put("vision_encoder.logit_scale")
    put("audio_encoder.patch_embedding.weight", 32, 1, 16, 16)
    for name, width in (("layer_norm", 32), ("encoder.layer_norm", 64)):
        put(f"audio_encoder.{name}.weight", width)
        put(f"audio_encoder.{name}.bias", width)
    put("audio_encoder.post_extract_proj.weight", 64, 32)
    put("audio_encoder.post_extract_proj.bias", 64)
    put("audio_encoder.encoder.pos_conv.0.bias", 64)
    put("audio_encoder.encoder.pos_conv.0.weight_g", 1, 1, 128)
    put("audio_encoder.encoder.pos_conv.0.weight_v", 64, 16, 128)
    bias = torch.randn(320, 4, generator=rng)
    for k in range(2):
        layer = f"audio_encoder.encoder.layers.{k}."
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            put(f"{layer}self_attn.{name}.weight", 64, 64)
            put(f"{layer}self_attn.{name}.bias", 64)
        put(f"{layer}self_attn.grep_linear.weight", 8, 16)
        put(f"{layer}self_attn.grep_linear.bias", 8)
        put(f"{layer}self_attn.grep_a", 1, 4, 1, 1)
        file[f"module.{layer}self_attn.relative_attention_bias.weight"] = bias
        for name, shape in (("fc1", (256, 64)), ("fc2", (64, 256))):
            put(f"{layer}{name}.weight", *shape)
            put(f"{layer}{name}.bias", shape[0])
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            put(f"{layer}{name}.weight", 64)
            put(f"{layer}{name}.bias", 64)
    for name, x in model.text.body.state_dict().items():
        put(f"multimodal_encoder.bert.{name}", *x.shape)
    file["module.multimodal_encoder.bert.embeddings.position_ids"] = torch.arange(128)[None]
    put("multimodal_encoder.cls.predictions.bias", 50)
    for name in ("t", "s", "v", "a"):
        put(f"contra_head_{name}.linear.weight", D, 64)
    for name in ("va", "vs", "vas"):
        put(f"contra_head_{name}.weight", D, 64 * len(name))
        put(f"contra_head_{name}.bias", D)
    for name, shape in (("linear1", (64, 64)), ("linear2", (2, 64))):
        put(f"itm_head.{name}.weight", *shape)
        put(f"itm_head.{name}.bias", shape[0])
    put("itm_head.layernorm.weight", 64)
    put("itm_head.layernorm.bias", 64)
    for kind in ("vision", "audio", "subtitle"):
        put(f"hidden_trans_{kind}_multimodal.0.weight", 64, 64)
        for name in ("0.bias", "1.weight", "1.bias"):
            put(f"hidden_trans_{kind}_multimodal.{name}", 64)
        put(f"{kind}_type_embeddings", 1, 1, 64)
    put("vision_frame_embedding", 1, 4, 64)
    put("audio_frame_embedding", 1, 1, 64)
    file["module.contra_temp"] = torch.tensor(0.05)
    return file


def write_release(folder, file):
    (folder / "ckpt").mkdir(parents=True)
    for step, content in ((9, {}), (10, file)):
        torch.save(content, folder / "ckpt" / f"model_step_{step}.pt")
    return str(folder)


def test_released_weights_load_by_their_names(words, tmp_path):
    file = released(words)
    folder = write_release(tmp_path / "pretrain_vast", file)
    for modalities in ("vas", "va", "v", "s"):
        model, _ = model_of(words, modalities)
        loaded, _ = model_of(words, modalities, folder)
        assert loaded.from_file == model.state_dict().keys()
        assert loaded.released_tau == pytest.approx(0.05)
    loaded, _ = model_of_spec(
        {
            "image_encoder": "vast-small", "text_encoder": "small", "embed_dim": D,
            "image_size": 32, "text_length": 12, "text_pooling": "cls",
            "image_stats": "encoder", "eval_resize": "crop", "modalities": "vas",
        }, words, False, folder)  # fmt: skip
    for ours, theirs in (
        ("clip_head.weight", "contra_head_vas.weight"),
        ("audio.relative_bias.weight",
         "audio_encoder.encoder.layers.1.self_attn.relative_attention_bias.weight"),
        ("audio.norm.bias", "audio_encoder.encoder.layer_norm.bias"),
        ("audio.layer_norm.bias", "audio_encoder.layer_norm.bias"),
        ("matching.norms.audio.weight", "hidden_trans_audio_multimodal.1.weight"),
        ("matching.frames.vision", "vision_frame_embedding"),
        ("text.projection.weight", "contra_head_t.linear.weight"),
    ):  # fmt: skip
        assert torch.equal(loaded.state_dict()[ours], file[f"module.{theirs}"])


def test_released_embeddings_of_another_number_of_frames(words, tmp_path):
    """The authors' number is that of the frames of pretraining; the nearest are taken."""
    file = released(words)
    eight = torch.randn(1, 8, 64)
    file["module.vision_frame_embedding"] = eight
    loaded, _ = model_of(words, weights=write_release(tmp_path / "release", file))
    assert torch.allclose(loaded.matching.frames["vision"].float(), eight[:, ::2])


@pytest.mark.parametrize(
    "change, words_of_error",
    [
        ({"audio_encoder.layer_norm.bias": None}, ("audio.layer_norm.bias", "are missing")),
        ({"audio_encoder.predictor.weight": torch.ones(3)}, ("audio.predictor.weight",)),
        ({"itm_head.linear2.bias": torch.ones(3)}, ("matching.linear2.bias",)),
    ],
)
def test_other_weights_are_refused_by_the_first_name(words, tmp_path, change, words_of_error):
    file = released(words)
    for name, x in change.items():
        file.pop(f"module.{name}", None)
        if x is not None:
            file[f"module.{name}"] = x
    folder = write_release(tmp_path / "release", file)
    with pytest.raises(UserError) as error:
        model_of(words, weights=folder)
    assert all(word in str(error.value) for word in words_of_error), error.value


# ------------------------------------------------------- training --------------------------------
def test_the_second_pass_gives_the_gradient_of_both_losses(words):
    """Against one graph of the contrastive loss and of the mean over the 3 B pairs, in chunks of
    any size."""
    model, _ = model_of(words)
    inputs, tokens = clips_of(words), words(TEXTS)
    draws = torch.tensor([[0.1, 0.9], [0.5, 0.4], [0.8, 0.2]]).double()
    clip, text, _ = model(inputs, tokens)
    pairs = mmts_vast.hard_pairs(clip, text, tokens, draws, tau=0.2, length=12)
    logits = model(inputs, pairs=pairs)[2]
    expected = mmts.clip_loss(clip, text, 0.1) + 0.3 * F.cross_entropy(logits, pairs.target)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(expected, parameters.values())
    accelerator = accelerate.Accelerator(cpu=True)
    for chunk in (0, 1, 2):
        grad_cache = mmts_vast.MatchingCache(model, accelerator, chunk, 0.3)
        clip, text, _ = grad_cache.encode(pixels=inputs, tokens=tokens)
        loss = mmts.clip_loss(clip, text, 0.1)
        pairs = mmts_vast.hard_pairs(clip, text, tokens, draws, tau=0.2, length=12)
        grad_cache.start_pairs(pairs, 3)
        accelerator.backward(loss)
        assert (loss + 0.3 * grad_cache.loss).item() == pytest.approx(expected.item())
        for (name, p), gradient in zip(parameters.items(), gradients):
            assert torch.allclose(p.grad, gradient, atol=1e-6), (chunk, name)
        model.zero_grad()


def test_the_divisor_itself_is_learnt():
    """4,350 equal pushes of the schedule of YouCook2 take the release's 0.07 to 0.0047; by its
    logarithm it would be 0.0656."""
    words = "--dataset youcook2 --init-from x --max-steps 4350"
    args = mmts_vast.parse_args(words.split())
    steps = common.count_steps(args, SimpleNamespace(examples=9283))
    assert steps.warmup == 435
    ends = []
    for temperature in (
        mmts_vast.LinearTemperature(args.tau, args.tau_clamp),
        common.Temperature(args.tau, True, args.tau_clamp),
    ):
        optimizer = common.make_optimizer([torch.nn.Linear(2, 2), temperature], args)
        (parameter,) = temperature.parameters()
        for step in range(steps.total):
            common.set_lr(optimizer, common.learning_rate(step, steps, args))
            parameter.grad = torch.tensor(1.0)
            optimizer.step()
            temperature.clamp()
        ends.append(temperature().item())
    assert ends == pytest.approx([0.0047, 0.0656], abs=1e-4)


def test_a_learnt_divisor_starts_at_that_of_the_release(words, tmp_path):
    model, _ = model_of(words, weights=write_release(tmp_path / "release", released(words)))
    args = mmts_vast.parse_args(["--baseline", "--learnable-tau"])
    assert mmts_vast.first_tau(args, model) == pytest.approx(0.05)
    args = mmts_vast.parse_args(["--baseline", "--learnable-tau", "--tau", "0.2"])
    assert mmts_vast.first_tau(args, model) == 0.2
    divisor = mmts_vast.LinearTemperature(0.2, (0.1, 0.5))
    for value, clamped in ((0.7, 0.5), (-1.0, 0.1)):
        divisor.tau.data.fill_(value)
        divisor.clamp()
        assert divisor().item() == pytest.approx(clamped)


RUN = (
    "--cpu --workers 0 --image-encoder vast-small --embed-dim 24 --batch-size 8 --lr 1e-3 "
    "--frames 2 --eval-frames 3 --log-every 1"
).split()
CLIPS = "--clips 60 20 20".split()


def test_a_run_learns_the_divisor_itself(tmp_path):
    """AdamW's first step moves what is learnt by the learning rate."""
    flags = "--baseline --learnable-tau --tau 0.2 --max-steps 1 --warmup-fraction 0"
    (row,) = few_steps(mmts_vast, tmp_path / "run", *RUN, *CLIPS, *flags.split(),
                       "--num-clusters", 2)
    assert abs(row["tau"] - 0.2) == pytest.approx(1e-3, rel=1e-3)


def test_reranking_by_hand():
    """The first two by cosine by their logits alone, the others behind them by cosine."""
    query = F.normalize(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), dim=1)
    angles = torch.tensor([0.1, 0.2, 0.3, 1.5])
    gallery = torch.stack([angles.cos(), angles.sin()], 1)
    best = rerank.best_candidates(query, gallery, 2)
    assert best.tolist() == [[0, 1], [3, 2]]
    scores = torch.tensor([[0.2, 0.7, 0.9, 0.9], [0.9, 0.9, 0.6, 0.4]])
    for positives, expected in (
        ([0, 3], [2, 2]),
        ([1, 2], [1, 1]),
        ([2, 1], [3, 3]),
        ([3, 0], [4, 4]),
    ):
        positives = torch.tensor(positives)[:, None]
        assert rerank.ranks(query, gallery, scores, best, positives).tolist() == expected
    positives = torch.tensor([[1], [2]])
    for low, high in ((-30, -20), (17, 20), (20, 30), (99, 100), (1e-9, 2e-9)):
        # logits whose probabilities are the same number in float32; those behind them are not read
        logits = torch.tensor([[low, high, 200, 200], [200, 200, high, low]])
        assert rerank.ranks(query, gallery, logits, best, positives).tolist() == [1, 1], low
    groups = torch.tensor([0, 0, 1, 1])  # the best of each is ranked
    positives = torch.tensor([[1], [0]])
    found = rerank.ranks(query, gallery, scores, best, positives, groups=groups)
    assert found.tolist() == [2, 2]


def copy_of(run, folder, change):
    """A copy of a run whose weights are change(name, weight)."""
    shutil.copytree(run, folder)
    tensors = tensors_in(run / "model.safetensors")
    tensors = {name: change(name, tensor) for name, tensor in tensors.items()}
    common.write_tensors(folder / "model.safetensors", tensors)
    return folder


def test_eval_reranks_and_says_so(tmp_path, capsys):
    """The first candidates by P(match), alone; without the head it is refused."""
    flags = [*RUN, *"--clips 24 8 24 --num-clusters 2 --baseline --max-steps 1".split()]
    summary = run_script(mmts_vast, tmp_path / "vas", *flags, "--matching-weight", 0.5)

    def evaluate(run, *flags):
        found = evaluated(run, "--tasks", "retrieval", *flags)
        return found["moving-emoji"]["metrics"]

    found = evaluate(tmp_path / "vas")  # at 3 frames, as in training
    assert found["text_to_image"] == summary["test"]["moving-emoji"]["text_to_image"]

    # other weights, since at first all texts are alike
    draws = torch.Generator().manual_seed(0)
    noisy = copy_of(
        tmp_path / "vas", tmp_path / "noisy",
        lambda name, x: x + 0.1 * torch.randn(x.shape, generator=draws))  # fmt: skip
    plain = evaluate(noisy)
    capsys.readouterr()
    found = evaluate(noisy, "--rerank", 10)
    words = "--rerank 10: the matching head ranks the first 10"
    assert words in capsys.readouterr().out
    assert found["rerank"]["cosine"]["text_to_image"] == plain["text_to_image"]
    assert found["text_to_image"] == found["rerank"]["10"]["text_to_image"]
    for direction in ("text_to_image", "image_to_text"):
        assert found[direction]["R@10"] == plain[direction]["R@10"]
        assert found[direction]["MnR"] != plain[direction]["MnR"]

    # the same order at logits whose probabilities are 0 or 1 in float32
    confident = copy_of(
        noisy, tmp_path / "confident",
        lambda name, x: 1024 * x if name.startswith("matching.linear2") else x)  # fmt: skip
    assert evaluate(confident, "--rerank", 10) == found

    few = "--cpu --workers 0 --clips 24 8 24 --num-clusters 2 --batch-size 8 --max-steps 1"
    run_script(mmts, tmp_path / "a", *few.split())
    with pytest.raises(UserError, match="--rerank: .* has no matching head"):
        evaluate(tmp_path / "a", "--rerank", 10)


@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--dataset", "emoji", "--modalities", "a"], "emoji has none of them; give v"),
        (["--dataset", "emoji", "--modalities", "va"], "emoji has no more than v; give that"),
    ],
)
def test_what_vast_refuses(flags, reason, tmp_path):
    with pytest.raises(UserError, match=re.escape(reason)):
        few_steps(
            mmts_vast, tmp_path / "r", *RUN, *(CLIPS if "--dataset" not in flags else []), *flags)


def test_the_image_encoder_learns_at_the_rate_of_vast(words):
    """5e-7 at the peak of both recipes; all else at --lr."""
    model, _ = model_of(words)
    for name, rate in (("youcook2", 3e-5), ("ssv2-lt", 2e-5)):
        args = mmts_vast.parse_args(["--dataset", name, "--init-from", "x"])
        optimizer = common.make_optimizer([model], args)
        common.set_lr(optimizer, args.lr)
        rates = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                rates[p] = group["lr"]
        for name, p in model.named_parameters():
            expected = 5e-7 if name.startswith("vision.") else rate
            assert rates[p] == pytest.approx(expected), name


@pytest.mark.parametrize(
    "words, reason",
    [
        ("--image-encoder small", "--image-encoder small: it has no matching head; give vast or"),
        ("--dataset youcook2", "--init-from is needed: this recipe fine-tunes VAST's weights"),
        ("--baseline --learnable-tau --negatives-tau 0.1", "--negatives-tau: only without"),
        ("--loss max-margin --baseline --label-smoothing 0.1", "--label-smoothing: only with"),
    ],
)
def test_flags_that_are_refused(words, reason, capsys):
    assert reason in refused(mmts_vast.parse_args, words.split(), capsys)


def test_other_scripts_do_not_train_vast(tmp_path):
    with pytest.raises(UserError, match="use python -m variants.mmts_vast"):
        few_steps(mmts, tmp_path / "r", *RUN[:9], *CLIPS)
