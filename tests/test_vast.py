"""VAST: sound and subtitles of the data, the model against computations by hand in float64, its
released names, its pairs, and runs of variants/mmts_vast.py."""

import math

import common
from contrastive.core.processes import UserError
from contrastive.data.sound import SLICE_LENGTH, filter_bank, read_sound, sound_slice
from contrastive.encoders import vast
from contrastive.encoders.models import model_of_spec
from contrastive.evaluation import rerank
from contrastive.evaluation.embed import encode_images

import accelerate
import av
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

import mmts
from helpers import (
    CPU, SPEC, assert_close, evaluated, few_steps, frame, open_splits, refused, run_script,
    tensors_in, unit, write_rows, write_video)
from variants import mmts_vast

D = 24  # width of the embeddings
DRAWS = torch.tensor([[0.1, 0.9], [0.5, 0.4], [0.8, 0.2]], dtype=torch.float64)
TEXTS = ["red apple", "blue bird on a tree", "green pear"]


def model_of(tokenizer, modalities="vas", weights=""):
    """A vast-small in float64, in eval mode, with its EvalTransform."""
    spec = SPEC | {"image_encoder": "vast-small", "embed_dim": D, "modalities": modalities}
    torch.manual_seed(0)
    model, transform = model_of_spec(spec, tokenizer, False, weights)
    for p in model.parameters():  # zeros and ones would hide a part that is not used
        if p.ndim == 1 and not weights:
            p.data += 0.1 * torch.randn(p.shape)
    return model.double().eval(), transform


def clips_of(tokenizer, n=3, frames=2):
    """The inputs of n clips in float64."""
    torch.manual_seed(1)
    return {
        "frames": torch.randn(n, frames, 3, 32, 32).double(),
        "sound": torch.randn(n, SLICE_LENGTH, 64).double(),
        "subtitle": vast.subtitle_tokens(tokenizer, TEXTS[:n]),
    }


# -------------------------------------------- sound ------------------------------------------
def test_the_filter_bank_is_kaldi_s():
    """Of whole windows of 25 ms every 10 ms. The numbers are those of a loop over the steps of
    compute-fbank-feats: every ninth band of two windows."""
    place = np.arange(1000)
    samples = 0.1 * np.sin(2 * np.pi * 700 / 16000 * place) + 0.01 * np.sin(place**2)
    bank = filter_bank(samples)
    assert bank.shape == (4, 64)
    first = [10.416, 13.671, 19.007, 14.040, 15.844, 17.606, 18.550, 20.397]
    last = [10.500, 10.747, 18.991, 16.929, 16.866, 18.277, 19.449, 19.126]
    assert np.allclose(bank[[0, 3], ::9], [first, last], atol=1e-3)


@pytest.mark.parametrize("windows, draw, number", [
    (2048, 0.0, 0),
    (2048, 0.5, 1),
    (2048, None, 1),
    (2048, 0.99, 2),  # whole slices have an empty one more
    (512, None, 0),
])
def test_a_slice_is_10_24_s_of_the_normalised_filter_bank(windows, draw, number):
    """Zeros are behind its end."""
    sound = 0.1 * np.random.default_rng(0).normal(size=160 * windows + 240)
    bank = (filter_bank(sound) - 15.41663) / (2 * 6.55582)
    bank = bank[1024 * number:1024 * (number + 1)]
    piece = sound_slice(sound, draw)
    assert np.allclose(piece[:len(bank)], bank, atol=1e-5)
    assert not piece[len(bank):].any()


def tone(pitch, seconds, rate=16000):
    times = np.arange(round(seconds * rate)) / rate
    return np.sin(2 * np.pi * pitch * times).astype(np.float32)


def write_sound(path, samples, rate=16000, codec="pcm_s16le", frames=0):
    """A file of stereo sound whose second channel is another, or of so many frames with sound."""
    path.parent.mkdir(parents=True, exist_ok=True)
    channels = np.stack([samples, tone(3000, len(samples) / rate, rate)]) * 0.5
    with av.open(str(path), "w") as out:
        stream = out.add_stream(codec, rate=rate, layout="stereo")
        if frames:
            video = out.add_stream("libx264", rate=10, width=96, height=64)
            for k in range(frames):
                picture = av.VideoFrame.from_ndarray(frame(k), format="rgb24")
                out.mux(video.encode(picture))
            out.mux(video.encode())
        sound = av.AudioFrame.from_ndarray(channels, format="fltp", layout="stereo")
        sound.sample_rate = rate
        out.mux(stream.encode(sound))
        out.mux(stream.encode())
    return path


def pitch_of(samples):
    """The loudest frequency in Hz, at 16 kHz."""
    return abs(np.fft.rfft(samples)).argmax() * 16000 / len(samples)


@pytest.mark.parametrize("name, codec, frames", [
    ("a.wav", "pcm_s16le", 0),
    ("a.mp3", "libmp3lame", 0),
    ("a.mp4", "aac", 40),
    ("a.ts", "aac", 40),  # it begins after 0
])
def test_sound_is_the_first_channel_of_the_window_at_16_khz(name, codec, frames, tmp_path):
    two = np.concatenate([tone(440, 2, 44100), tone(880, 2, 44100)])
    file = write_sound(tmp_path / name, two, 44100, codec, frames)
    whole = read_sound(file.read_bytes())
    window = read_sound(file, 2.5, 3.5)
    assert len(whole) == pytest.approx(64000, abs=4000)
    assert pitch_of(whole[4000:28000]) == pytest.approx(440, abs=2)
    assert len(window) == pytest.approx(16000, abs=200)
    assert pitch_of(window) == pytest.approx(880, abs=2)
    assert read_sound(file, 9, 10) is None


# --------------------------------------------- data ------------------------------------------
def test_youcook2_in_vast_s_layout(tmp_path):
    """[{video_id, desc, subtitle}], audios/ID.wav or .mp3, else the clip's own sound, else none."""
    header = ["video_id", "desc", "subtitle"]
    rows = [
        ("yt1_0_4", "chop the onion", "so now chop it"),
        ("yt1_4_8", "fry it", ""),
        ("yt2_1_3", "add salt", "salt goes in"),
        ("yt3_2_9", "stir", "keep going"),
    ]
    write_rows(tmp_path / "descs_cap_train.json", header, rows)
    write_rows(tmp_path / "descs_cap_test.json", header, rows[:3])
    for name, _, _ in rows:
        write_video(tmp_path / "videos" / f"{name}.mp4", range(8))
    write_sound(tmp_path / "audios" / "yt1_0_4.wav", tone(440, 3))
    write_sound(tmp_path / "audios" / "yt1_4_8.mp3", tone(880, 3), codec="libmp3lame")
    write_sound(tmp_path / "videos" / "yt2_1_3.mp4", tone(1760, 3), codec="aac", frames=8)
    options = {"data_dir": str(tmp_path), "modalities": "vas", "frames": 4, "eval_frames": 6}
    data = common.load_data("youcook2", "train", **options)
    for k, (_, caption, subtitle) in enumerate(rows):
        assert data.captions(k)[0] == caption
        assert data.sound_and_text(k)["subtitle"] == subtitle
    for k, pitch in enumerate((440, 880, 1760)):
        samples = data.samples(k)
        assert pitch_of(samples[4000:40000]) == pytest.approx(pitch, abs=2)
        assert torch.equal(data.sound_and_text(k)["sound"], sound_slice(samples))
    assert read_sound(tmp_path / "videos" / "yt3_2_9.mp4") is None
    assert not data.sound_and_text(3)["sound"].any()
    assert "1 without sound, which is zeros" in data.note
    assert "1 without a subtitle" in data.note
    test = common.load_data("youcook2", "test", **options)
    assert len(data.read(0)) == 4
    assert len(test.read(0)) == 6


def test_own_windows_cut_the_sound_of_their_video_too(tmp_path):
    samples = np.concatenate([tone(440, 2), tone(880, 2)])
    write_sound(tmp_path / "a.mp4", samples, codec="aac", frames=40)
    path = write_rows(tmp_path / "own.csv", ["video", "start", "end", "caption", "split"], [
        ("a.mp4", 0.0, 2.0, "one", "train"),
        ("a.mp4", 2.0, 4.0, "two", "train")])
    data = open_splits(path, modalities="vas", frames=3)["train"]
    assert pitch_of(data.samples(0)[4000:28000]) == pytest.approx(440, abs=2)
    assert pitch_of(data.samples(1)[4000:28000]) == pytest.approx(880, abs=2)
    assert "no subtitles" in data.note


@pytest.fixture(scope="module")
def emoji():
    options = {"modalities": "vas", "clips": [12, 4, 4], "frames": 2, "image_size": 32}
    return common.load_data("moving-emoji", "train", **options)


def test_each_clip_of_a_batch_has_its_own_sound_and_subtitle(tokenizer, emoji):
    _, transform = model_of(tokenizer)
    augments = [common.Augment(32, 1.0)]
    (batch,) = common.Batches(emoji, augments, transform, 8, 0, first=0, last=1, device=CPU)
    (inputs,) = batch["views"]
    parts = [emoji.sound_and_text(row) for row in batch["rows"]]
    sounds = torch.stack([part["sound"] for part in parts])
    subtitles = [part["subtitle"] for part in parts]
    expected = vast.subtitle_tokens(tokenizer, subtitles)["input_ids"]
    assert torch.equal(inputs["sound"], sounds)
    assert torch.equal(inputs["subtitle"]["input_ids"], expected)
    assert len(set(subtitles)) > 4


def test_each_clip_of_an_evaluation_has_its_own_sound_and_subtitle(tokenizer, emoji):
    model, transform = model_of(tokenizer)
    embeddings = encode_images(model.float(), emoji, transform, CPU, batch=5).image
    for row in range(len(emoji)):
        part = emoji.sound_and_text(row)
        inputs = {
            "frames": transform(emoji.read(row))[None],
            "sound": part["sound"][None],
            "subtitle": vast.subtitle_tokens(tokenizer, [part["subtitle"]]),
        }
        assert_close(embeddings[row], model(inputs)[0][0], 1e-4)


# -------------------------------------------- BEATs ------------------------------------------
def bucket_by_hand(distance):
    """Of 320: 160 for the keys behind the query; 80 exact ones, then logarithmic ones up to 800."""
    bucket = abs(distance)
    if bucket >= 80:
        share = math.log(bucket / 80) / math.log(10)
        bucket = 80 + int(80 * share)
    if distance > 0:
        return bucket + 160
    return bucket


def test_distances_beyond_the_sound_share_the_last_buckets():
    buckets = vast.relative_buckets(1000)
    assert buckets[0, [79, 80, 800, 999]].tolist() == [239, 240, 319, 319]


def positions_by_hand(conv, x):
    """A convolution of two groups with a normalised weight over 128 places; x (256, 8)."""
    norm = conv.weight_v.pow(2).sum((0, 1)).sqrt()
    weight = conv.weight_v * conv.weight_g / norm  # (8, 4, 128)
    windows = F.pad(x, (0, 0, 64, 63)).unfold(0, 128, 1)  # (256, 8, 128)
    groups = []
    for kernel, window in zip(weight.split(4), windows.split(4, 1)):
        groups.append(torch.einsum("lck,ock->lo", window, kernel))
    return F.gelu(torch.cat(groups, 1) + conv.bias)


def attention_by_hand(attention, x, bias):
    """Two heads, whose bias by distance (2, 256, 256) has a gate of the query."""
    queries = attention.q_proj(x).split(4, 1)
    keys = attention.k_proj(x).split(4, 1)
    values = attention.v_proj(x).split(4, 1)
    scales = attention.grep_a.flatten()
    heads = []
    for q, k, v, scale, b in zip(queries, keys, values, scales, bias):
        gates = attention.grep_linear(q).view(256, 2, 4)
        g1, g2 = gates.sum(2).sigmoid().T
        gate = g1 * (g2 * scale - 1) + 2
        logits = q @ k.T / 2 + gate[:, None] * b
        heads.append(logits.softmax(1) @ v)
    return attention.out_proj(torch.cat(heads, 1))


@torch.no_grad()
def test_beats_is_the_loop():
    """Patches, positions, gated attention and the scale of the residuals."""
    size = vast.BeatsSize(width=8, patch_width=6, layers=2, heads=2, groups=2)
    torch.manual_seed(0)
    beats = vast.Beats(size).double().eval()
    for p in beats.parameters():
        p.data += 0.2 * torch.randn(p.shape)
    sound = torch.randn(1, 1024, 64).double()
    patches = sound[0].unfold(0, 16, 16).unfold(1, 16, 16).flatten(0, 1)  # (256, 16, 16)
    x = torch.einsum("lij,wij->lw", patches, beats.patch_embedding.weight[:, 0])
    x = beats.post_extract_proj(beats.layer_norm(x))
    x = beats.norm(x + positions_by_hand(beats.pos_conv, x))
    buckets = [bucket_by_hand(distance) for distance in range(-255, 256)]
    place = torch.arange(256)
    bias = beats.relative_bias.weight[buckets]
    bias = bias[place - place[:, None] + 255].permute(2, 0, 1)
    for layer in beats.layers:
        y = attention_by_hand(layer.self_attn, x, bias)
        x = layer.self_attn_layer_norm(4**0.25 * x + y)
        y = layer.fc2(F.gelu(layer.fc1(x)))
        x = layer.final_layer_norm(4**0.25 * x + y)
    assert_close(beats(sound)[0], x, 1e-10)


# ------------------------------------------ embeddings ---------------------------------------
def plain_bert(model):
    """BERT with the same weights, without cross-attention: transformers gives one that has it a
    causal mask, with which CLS sees nothing."""
    config = transformers.BertConfig(**model.text.config)
    config.is_decoder = config.add_cross_attention = False
    bert = transformers.BertModel(config, add_pooling_layer=False).double().eval()
    bert.load_state_dict(model.text.body.state_dict(), strict=False)
    return bert


@torch.no_grad()
@pytest.mark.parametrize("modalities", vast.MODALITIES)
def test_embeddings_are_layers_of_the_concatenated_modalities_and_of_bert(tokenizer, modalities):
    """CLS of the frames, all tokens of the sound and CLS of the subtitle; a bias unless alone."""
    inputs = clips_of(tokenizer)
    model, _ = model_of(tokenizer, modalities)
    bert = plain_bert(model)
    parts = []
    if "v" in modalities:
        states = model.vision.body.forward_features(inputs["frames"].flatten(0, 1))
        parts.append(states[:, 0].view(3, 2, -1).mean(1))
    if "a" in modalities:
        parts.append(model.audio(inputs["sound"]).mean(1))
    if "s" in modalities:
        parts.append(bert(**inputs["subtitle"]).last_hidden_state[:, 0])
    joined = torch.cat(parts, 1)
    expected = joined @ model.clip_head.weight.T
    if len(modalities) > 1:
        expected += model.clip_head.bias
    tokens = tokenizer(TEXTS)
    states = bert(**tokens).last_hidden_state
    clip, text, features = model(inputs, tokens)
    assert_close(clip, expected)
    assert_close(features, joined)
    assert_close(text, states[:, 0] @ model.text.projection.weight.T)


# ------------------------------------------- matching ----------------------------------------
@torch.no_grad()
def test_the_matching_head_by_hand(tokenizer):
    """Linear, LayerNorm, frame and kind embeddings of each token; all tokens count, padding of the
    subtitle, too; two layers on CLS."""
    model, _ = model_of(tokenizer)
    inputs = clips_of(tokenizer, frames=8)
    head = model.matching
    tokens = model.clip_tokens(inputs)
    sequence = []
    for kind, frames in (("vision", 8), ("audio", 1), ("subtitle", 1)):
        norm = head.norms[kind]
        x = head.linears[kind](tokens[kind][1])
        x = F.layer_norm(x, (64,), norm.weight, norm.bias, 1e-12)
        for k, y in enumerate(x.view(frames, -1, 64)):
            if kind != "subtitle":  # four frame embeddings, the nearest for each of eight frames
                y = y + head.frames[kind][0, k // 2]
            sequence.append(y + head.kinds[kind][0])
    caption = tokenizer(TEXTS[:1])["input_ids"]
    mask = torch.ones(1, 1, 1, caption.shape[1], dtype=torch.bool)
    states = model.text.body(
        caption, mask, encoder_hidden_states=torch.cat(sequence)[None]).last_hidden_state
    norm = head.layernorm
    hidden = F.gelu(head.linear1(states[:, 0]))
    hidden = F.layer_norm(hidden, (64,), norm.weight, norm.bias, 1e-12)
    captions = tokenizer([TEXTS[0], TEXTS[0], TEXTS[1]])  # with padding
    clips = torch.tensor([1, 0, 0])
    pairs = vast.Pairs(clips, captions["input_ids"], captions["attention_mask"], None)
    _, _, logits = model(inputs, pairs=pairs)
    assert_close(logits[:1], head.linear2(hidden))
    assert not torch.allclose(logits[0], logits[1], atol=1e-3)


def test_negatives_are_drawn_by_their_probability():
    """softmax(sim / tau) + 1e-4 without the own pair, by the inverse of its distribution."""
    sim = unit(4, 6) @ unit(4, 6, seed=1).T
    weights = (sim / 0.3).softmax(1) + 1e-4
    weights.fill_diagonal_(0)
    counts = torch.zeros(4, 4).double()
    for k in range(1000):
        draw = torch.full((4,), (k + 0.5) / 1000).double()
        counts[range(4), mmts_vast.hard_negatives(sim, 0.3, draw)] += 1
    assert_close(counts / 1000, weights / weights.sum(1, keepdim=True), 2e-3)


def test_pairs_by_hand(tokenizer):
    """Each clip with its caption and a wrong one, each caption with a wrong clip: 3 B, by clip."""
    clip = unit(3, D)
    text = unit(3, D, seed=1)
    tokens = tokenizer(TEXTS)
    pairs = mmts_vast.hard_pairs(clip, text, tokens, DRAWS, tau=0.5, length=12)
    sim = clip @ text.T
    wrong_text = mmts_vast.hard_negatives(sim, 0.5, DRAWS[:, 0]).tolist()
    wrong_clip = mmts_vast.hard_negatives(sim.T, 0.5, DRAWS[:, 1]).tolist()
    expected = []
    for k in range(3):
        expected.append((k, k, 1))
        expected.append((k, wrong_text[k], 0))
        expected.append((wrong_clip[k], k, 0))
    texts = tokenizer.tokenizer.batch_decode(pairs.ids, skip_special_tokens=True)
    rows = [TEXTS.index(text) for text in texts]
    triples = zip(pairs.clips.tolist(), rows, pairs.target.tolist())
    assert sorted(triples) == sorted(expected)
    assert pairs.clips.tolist() == sorted(pairs.clips)


# --------------------------------------- released weights ------------------------------------
OUR_NAMES = {  # of modules and tensors -> the released ones
    "vision.body": "vision_encoder.visual",
    "text.body": "multimodal_encoder.bert",
    "text.projection": "contra_head_t.linear",
    "audio.patch_embedding": "audio_encoder.patch_embedding",
    "audio.layer_norm": "audio_encoder.layer_norm",
    "audio.post_extract_proj": "audio_encoder.post_extract_proj",
    "audio.pos_conv.bias": "audio_encoder.encoder.pos_conv.0.bias",
    "audio.pos_conv.weight_g": "audio_encoder.encoder.pos_conv.0.weight_g",
    "audio.pos_conv.weight_v": "audio_encoder.encoder.pos_conv.0.weight_v",
    "audio.norm": "audio_encoder.encoder.layer_norm",
    "matching.linear1": "itm_head.linear1",
    "matching.layernorm": "itm_head.layernorm",
    "matching.linear2": "itm_head.linear2",
    "matching.frames.audio": "audio_frame_embedding",
}
AUDIO_LAYER = (
    "self_attn.k_proj self_attn.v_proj self_attn.q_proj self_attn.out_proj self_attn.grep_linear "
    "self_attn.grep_a fc1 fc2 self_attn_layer_norm final_layer_norm").split()
for name in AUDIO_LAYER:
    for k in range(2):
        OUR_NAMES[f"audio.layers.{k}.{name}"] = f"audio_encoder.encoder.layers.{k}.{name}"
for kind in ("vision", "audio", "subtitle"):
    OUR_NAMES[f"matching.linears.{kind}"] = f"hidden_trans_{kind}_multimodal.0"
    OUR_NAMES[f"matching.norms.{kind}"] = f"hidden_trans_{kind}_multimodal.1"
    OUR_NAMES[f"matching.kinds.{kind}"] = f"{kind}_type_embeddings"
OTHERS = (  # which the model does not have
    "vision_encoder.visual.head.weight vision_encoder.text.positional_embedding "
    "vision_encoder.logit_scale multimodal_encoder.cls.predictions.bias "
    "multimodal_encoder.bert.embeddings.position_ids contra_head_a.linear.weight").split()


@pytest.fixture
def released(tokenizer):
    """The content of a released file at small widths; {our name: tensor}."""
    file = {name: torch.ones(3) for name in OTHERS}
    for head, width in (("va", 128), ("vs", 128), ("vas", 192)):
        file[f"contra_head_{head}.weight"] = torch.randn(D, width)
        file[f"contra_head_{head}.bias"] = torch.randn(D)
    for head in "vs":
        file[f"contra_head_{head}.linear.weight"] = torch.randn(D, 64)
    model, _ = model_of(tokenizer)
    tensors = {}
    for name, x in model.state_dict().items():
        tensors[name] = torch.randn(x.shape)
        for ours, theirs in OUR_NAMES.items():
            if name.startswith(ours):
                file[name.replace(ours, theirs)] = tensors[name]
    bias = tensors["audio.relative_bias.weight"]
    for k in range(2):
        layer = f"audio_encoder.encoder.layers.{k}"
        file[f"{layer}.self_attn.relative_attention_bias.weight"] = bias
    # those of eight frames, of which the model takes the nearest
    frames = tensors["matching.frames.vision"]
    file["vision_frame_embedding"] = torch.stack([frames, -frames], 2).flatten(1, 2)
    file["contra_temp"] = torch.tensor(0.05)
    return {f"module.{name}": x for name, x in file.items()}, tensors


def write_release(folder, file):
    (folder / "ckpt").mkdir()
    torch.save({}, folder / "ckpt" / "model_step_9.pt")
    torch.save(file, folder / "ckpt" / "model_step_10.pt")
    return str(folder)


@pytest.mark.parametrize("head", ["vas", "va", "v.linear", "s.linear"])
def test_released_weights_fill_the_model_by_their_names(tokenizer, released, head, tmp_path):
    file, tensors = released
    modalities = head.partition(".")[0]
    model, _ = model_of(tokenizer, modalities, write_release(tmp_path, file))
    for name, x in model.float().state_dict().items():
        expected = tensors[name]
        if name.startswith("clip_head"):
            expected = file[name.replace("clip_head", f"module.contra_head_{head}")]
        assert torch.equal(x, expected), name


@pytest.mark.parametrize("name, tensor", [
    ("audio_encoder.predictor.weight", torch.ones(3)),
    ("itm_head.linear2.bias", torch.ones(3)),
    ("audio_encoder.layer_norm.bias", None),
])
def test_a_tensor_too_many_or_misshapen_or_missing_is_refused(
        tokenizer, released, name, tensor, tmp_path):
    file, _ = released
    file[f"module.{name}"] = tensor
    with pytest.raises(UserError, match=name.partition(".")[2]):
        model_of(tokenizer, weights=write_release(tmp_path, file))


# ------------------------------------------- training ----------------------------------------
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_the_second_pass_gives_the_gradient_of_both_losses(tokenizer, chunk):
    """Against one graph of the contrastive loss and of the mean over the 3 B pairs."""
    model, _ = model_of(tokenizer)
    inputs = clips_of(tokenizer)
    tokens = tokenizer(TEXTS)
    clip, text, _ = model(inputs, tokens)
    pairs = mmts_vast.hard_pairs(clip, text, tokens, DRAWS, tau=0.2, length=12)
    _, _, logits = model(inputs, pairs=pairs)
    expected = mmts.clip_loss(clip, text, 0.1) + 0.3 * F.cross_entropy(logits, pairs.target)
    gradients = torch.autograd.grad(expected, model.parameters())

    accelerator = accelerate.Accelerator(cpu=True)
    grad_cache = mmts_vast.MatchingCache(model, accelerator, chunk, 0.3)
    clip, text, _ = grad_cache.encode(pixels=inputs, tokens=tokens)
    loss = mmts.clip_loss(clip, text, 0.1)
    grad_cache.start_pairs(pairs, 3)
    accelerator.backward(loss)
    assert (loss + 0.3 * grad_cache.matching_loss).item() == pytest.approx(expected.item())
    for p, gradient in zip(model.parameters(), gradients):
        assert_close(p.grad, gradient, 1e-6)


def test_the_image_encoder_learns_at_a_rate_of_its_own(tokenizer):
    model, _ = model_of(tokenizer)
    args = mmts_vast.parse_args(["--dataset", "youcook2", "--init-from", "x"])
    optimizer = common.make_optimizer([model], args)
    common.set_lr(optimizer, args.lr)
    of_images = {id(p) for p in model.vision.parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            expected = 3e-5
            if id(p) in of_images:
                expected = 5e-7
            assert group["lr"] == pytest.approx(expected)


@pytest.mark.parametrize("flags, tau", [("", 0.05), ("--tau 0.2", 0.2)])
def test_a_learnt_divisor_starts_at_that_of_the_release(tokenizer, released, tmp_path, flags, tau):
    file, _ = released
    model, _ = model_of(tokenizer, weights=write_release(tmp_path, file))
    args = mmts_vast.parse_args(["--baseline", "--learnable-tau", *flags.split()])
    assert mmts_vast.first_tau(args, model) == pytest.approx(tau)


RUN = (
    "--cpu --workers 0 --image-encoder vast-small --embed-dim 24 --batch-size 8 --lr 1e-3 "
    "--frames 2 --log-every 1 --clips 24 8 24 --num-clusters 2 --max-steps 1").split()


def test_a_run_learns_the_divisor_itself(tmp_path):
    """By the learning rate in the first step of AdamW, below 0.01 too."""
    flags = "--baseline --learnable-tau --tau 0.005 --warmup-fraction 0".split()
    (row,) = few_steps(mmts_vast, tmp_path / "run", *RUN, *flags)
    assert abs(row["tau"] - 0.005) == pytest.approx(1e-3, rel=1e-3)


# ------------------------------------------- reranking ---------------------------------------
QUERY = torch.eye(2)
ANGLES = torch.tensor([0.1, 0.2, 0.3, 1.5])
GALLERY = torch.stack([ANGLES.cos(), ANGLES.sin()], 1)
SCORES = torch.tensor([[0.2, 0.7, 0.9, 0.9], [0.9, 0.9, 0.6, 0.4]])


@pytest.mark.parametrize("positives, groups, ranks", [
    ([0, 3], None, [2, 2]),
    ([1, 2], None, [1, 1]),
    ([2, 1], None, [3, 3]),
    ([3, 0], None, [4, 4]),
    ([1, 0], [0, 0, 1, 1], [2, 2]),  # by the best of each group
])
def test_reranking_by_hand(positives, groups, ranks):
    """The first two by cosine by their logits alone, the others behind them by cosine."""
    best = rerank.best_candidates(QUERY, GALLERY, 2)
    positives = torch.tensor(positives)[:, None]
    if groups:
        groups = torch.tensor(groups)
    found = rerank.ranks(QUERY, GALLERY, SCORES, best, positives, groups=groups)
    assert found.tolist() == ranks


@pytest.mark.parametrize("low, high", [(-30, -20), (99, 100), (1e-9, 2e-9)])
def test_reranking_by_hand_of_logits_with_one_probability(low, high):
    """In float32; those behind the candidates are not read."""
    logits = torch.tensor([[low, high, 200, 200]])
    best = torch.tensor([[0, 1]])
    positives = torch.tensor([[1]])
    assert rerank.ranks(QUERY[:1], GALLERY, logits, best, positives).tolist() == [1]


def metrics_of(run, *flags):
    return evaluated(run, "--tasks", "retrieval", *flags)["moving-emoji"]["metrics"]


def test_eval_reranks_the_first_candidates_beside_the_cosines(tmp_path):
    run_script(mmts_vast, tmp_path / "run", *RUN, "--matching-weight", 0.5)
    # other weights, since at first all texts are alike
    torch.manual_seed(0)
    tensors = tensors_in(tmp_path / "run" / "model.safetensors")
    for name, x in tensors.items():
        tensors[name] = x + 0.1 * torch.randn(x.shape)
    common.write_tensors(tmp_path / "run" / "model.safetensors", tensors)
    plain = metrics_of(tmp_path / "run")
    reranked = metrics_of(tmp_path / "run", "--rerank", 10)
    assert reranked["rerank"]["cosine"]["text_to_image"] == plain["text_to_image"]
    assert reranked["text_to_image"] == reranked["rerank"]["10"]["text_to_image"]
    for direction in ("text_to_image", "image_to_text"):
        assert reranked[direction]["R@10"] == plain[direction]["R@10"]
        assert reranked[direction]["MnR"] != plain[direction]["MnR"]


def test_reranking_without_a_matching_head_is_refused(tmp_path):
    flags = "--cpu --workers 0 --clips 24 8 24 --num-clusters 2 --batch-size 8 --max-steps 1"
    run_script(mmts, tmp_path / "run", *flags.split())
    with pytest.raises(UserError, match="--rerank: .* has no matching head"):
        metrics_of(tmp_path / "run", "--rerank", 10)


# -------------------------------------------- flags ------------------------------------------
@pytest.mark.parametrize("script, flags, reason", [
    (mmts_vast, "--dataset emoji --modalities a", "emoji has none of them; give v"),
    (mmts_vast, "--dataset emoji --modalities va", "emoji has no more than v; give that"),
    (mmts, "--clips 24 8 24", "use python -m variants.mmts_vast"),
])
def test_data_without_the_modalities_and_other_scripts_are_refused(
        script, flags, reason, tmp_path):
    usual = "--cpu --workers 0 --image-encoder vast-small --batch-size 8 --max-steps 1".split()
    with pytest.raises(UserError, match=reason):
        few_steps(script, tmp_path / "run", *usual, *flags.split())


@pytest.mark.parametrize("flags, reason", [
    ("--image-encoder small", "--image-encoder small: it has no matching head; give vast or"),
    ("--dataset youcook2", "--init-from is needed: this recipe fine-tunes VAST's weights"),
    ("--loss max-margin --baseline --label-smoothing 0.1", "--label-smoothing: only with"),
])
def test_flags_that_are_refused(flags, reason, capsys):
    assert reason in refused(mmts_vast.parse_args, flags.split(), capsys)
