"""VGT: its forward against loops, its authors' files, runs on moving-emoji and on files."""

import math
from argparse import Namespace

import common
from contrastive.core.processes import UserError
from contrastive.data.regions import Regions
from contrastive.encoders.texts import Tokenizer
from contrastive.encoders.vgt import VideoGraph, crops
from contrastive.evaluation.answers import choice_texts

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.nn import TransformerEncoderLayer

from helpers import (
    assert_close, evaluated, model_of, of_set, refused, run_script, steps, write_rows)
from variants import mama_qa

VGT = (
    "--cpu --clips 32 8 8 --batch-size 8 --meta-batch-size 4 --meta-size 12 --log-every 1 "
    "--eval-every 0 --max-steps 2 --recipe moving-emoji-vgt --image-size 16 --frames 4 "
    "--embed-dim 32").split()


# --------------------------------------- the video graph -------------------------------------
def attention(layer, x):
    """PostNorm of one sequence (L, width), by torch's own layer."""
    hidden = len(layer.fc1.bias)
    plain = TransformerEncoderLayer(
        x.shape[1], layer.heads, hidden, dropout=0, activation=F.gelu, layer_norm_eps=1e-12)
    tensors = layer.state_dict().values()  # in torch's order
    plain.load_state_dict(dict(zip(plain.state_dict(), tensors)))
    return plain.double().eval()(x)


def places_by_hand(graph, boxes):
    """Two 1x1 convolutions of all regions with norms over groups of channels: (R, 5) -> (R, d)."""
    y = boxes
    for first in (0, 3):
        kernel = graph.box[first].weight[:, :, 0, 0]
        y = F.linear(y, kernel, graph.box[first].bias)
        norm = graph.box[first + 1]
        y = F.group_norm(y.T[None], 8, norm.weight, norm.bias)
        y = y[0].T.relu()
    return y


def pooled_by_hand(graph, nodes, edges):
    """Layers (A + 1) h W + bias of a frame, their sum with the nodes, and its weighted mean."""
    h = nodes
    for layer in graph.graph:
        projected = h @ layer.weight
        h = edges @ projected + layer.bias + projected
        h = h.relu()
    h = h + nodes
    weights = graph.weight(h).softmax(0)
    return weights[:, 0] @ h


@torch.no_grad()
def test_the_graph_against_loops():
    """Steps 1 to 6 of one video of two clips, region by region and frame by frame."""
    torch.manual_seed(0)
    graph = VideoGraph(6, 16, regions=5, dropout=0.3).double().eval()
    frames = torch.randn(8, 6).double()
    regions = torch.randn(8, 5, 6).double()
    boxes = torch.randn(8, 5, 5).double()
    (output,) = graph(frames[None], regions[None], boxes[None])

    places = places_by_hand(graph, boxes.flatten(0, 1))
    x = torch.cat([regions, places.view(8, 5, -1)], -1)
    x = F.elu(graph.region(x))  # (T, R, d)
    pooled = []
    for clip in x.split(4):
        nodes = [attention(graph.nodes, region) for region in clip.unbind(1)]
        nodes = torch.stack(nodes, 1)
        edges = graph.key(nodes) @ graph.query(nodes).mT
        # first whole, then by rows
        edges = attention(graph.edges, edges.flatten(1))
        edges = edges.view(4, 5, 5).softmax(-1)
        for t in range(4):
            pooled.append(pooled_by_hand(graph, nodes[t], edges[t]))
    y = F.gelu(graph.frame(frames))
    y = F.layer_norm(y, (16,), graph.norm.weight, graph.norm.bias, 1e-12)
    y = torch.cat([y, torch.stack(pooled)], 1)
    assert_close(output, F.elu(graph.merge(y)), 1e-9)


# ------------------------------------------- answers -----------------------------------------
TEXTS = ["red", "green pear", "", "blue bird on a tree", "number 3", "yet another"]


def vgt_of(tokenizer, answers=()):
    torch.manual_seed(0)
    questions = {"answers": list(answers), "model": "vgt", "regions": 5}
    model = model_of(tokenizer, image_size=16, questions=questions)
    for p in model.parameters():
        p.data += 0.1 * torch.randn(p.shape)
    return model.double().eval()


def videos_of(model):
    """Pixels and boxes of two videos of two clips, and steps 1 to 6 of each alone, (8, d)."""
    torch.manual_seed(1)
    pixels = torch.randn(2, 8, 3, 16, 16).double()
    corner = 8 * torch.rand(2, 8, 5, 2).double()
    boxes = torch.cat([corner, corner + 4], -1)
    graphs = []
    for one in zip(pixels.split(1), boxes.split(1)):
        graphs += model.graph(*model.graph_inputs(*one))
    return pixels, boxes, graphs


def attend_by_hand(video, texts):
    """Step 8: video (n, d), words (C, L, d) -> (n, d)."""
    rows = []
    for query in video:
        sums = []
        for text in texts:
            weights = (text @ query).softmax(0)
            sums.append(query + weights @ text)
        rows.append(torch.stack(sums).amax(0))
    return torch.stack(rows)


def summary_by_hand(model, frames, words):
    """Steps 7 to 9 of a video: frames (8, d), words (C, L, d) -> (d,)."""
    clips = frames.view(2, 4, 16).mean(1)
    x = attend_by_hand(clips, words)
    angles = 10_000 ** (-torch.arange(0, 16, 2) / 16)
    x[0, 1::2] += 1  # the first place
    x[1, ::2] += angles.sin()
    x[1, 1::2] += angles.cos()
    x = F.layer_norm(x, (16,), model.norm.weight, model.norm.bias, 1e-12)
    return model.out(attention(model.whole, x).mean(0))


@torch.no_grad()
@pytest.mark.parametrize("at_frames", [False, True])
def test_scores_of_choices_by_hand(tokenizer, at_frames):
    """Of two and of three; a text is read to the length of the longest of its question's."""
    model = vgt_of(tokenizer)
    model.at_frames = at_frames  # as in TGIF-QA's action and transition
    pixels, boxes, graphs = videos_of(model)
    choices = tokenizer(TEXTS)
    choices = {name: x.unflatten(0, (2, 3)) for name, x in choices.items()}
    choices["choice_mask"] = torch.tensor([[True, True, False], [True] * 3])
    question = tokenizer(["a", "b"]) | {"boxes": boxes}
    _, _, scores = model(pixels, None, question, choices)
    assert scores[0, 2] == -math.inf
    for row, texts in enumerate((TEXTS[:2], TEXTS[3:])):
        tokens = tokenizer(texts)
        words, _ = model.read(tokens)
        frames = graphs[row]
        if at_frames:
            frames = attend_by_hand(frames, words)
        summary = summary_by_hand(model, frames, words)
        for c, length in enumerate(tokens["attention_mask"].sum(1)):
            mean = words[c, :length].mean(0)
            assert_close(scores[row, c], mean @ summary, 1e-6)


@torch.no_grad()
def test_answers_of_the_vocabulary_by_hand(tokenizer):
    """The product of the scores of video and question; answers have five tokens, and are encoded
    anew in training."""
    model = vgt_of(tokenizer, TEXTS[3:])
    pixels, boxes, graphs = videos_of(model)
    question = tokenizer(TEXTS[:2])
    _, _, scores = model(pixels, None, question | {"boxes": boxes})
    _, answers = model.read(Tokenizer(tokenizer.tokenizer, 5)(TEXTS[3:]))
    for row, text in enumerate(TEXTS[:2]):
        words, (mean,) = model.read(tokenizer([text]))
        summary = summary_by_hand(model, graphs[row], words)
        expected = (answers @ summary) * (answers @ mean)
        assert_close(scores[row], expected, 1e-6)
    assert model.cached_vocabulary is not None
    assert model.train().cached_vocabulary is None


@pytest.mark.parametrize("token, model, text", [
    ("</s>", "vgt", "q </s> a"), (None, "vgt", "q a"), ("[SEP]", "fusion", "q a")])
def test_a_question_and_its_choice_are_parted_by_the_token_of_the_text_encoder(
        token, model, text):
    tokenizer = Namespace(tokenizer=Namespace(sep_token=token))
    assert choice_texts(["q"], [["a"]], model, tokenizer) == [text]


# ------------------------------------------- regions -----------------------------------------
def test_a_crop_shows_its_box():
    frames = torch.arange(384.0).view(2, 3, 8, 8)
    boxes = torch.tensor([[0.0, 0, 8, 8], [4, 0, 8, 4]])
    whole, quarter = crops(frames, boxes.expand(2, 2, 4))[1]
    assert_close(whole, frames[1], 1e-3)
    small = F.interpolate(frames[1:, :, :4, 4:], scale_factor=2, mode="bilinear")
    # borders see beyond the box
    difference = (quarter - small[0])[:, 1:-1, 2:-2]
    assert difference.abs().max() < 1e-3


def test_the_first_box_of_moving_emoji_holds_the_drawing():
    data = common.load_data(
        "moving-emoji", "val", clips=(64, 24, 24), frames=4, image_size=32, regions=5)
    for row, boxes in enumerate(data.column("boxes")):
        x1, y1, x2, y2 = torch.tensor(boxes[0][0]).round().int().clamp(min=0)
        picture = data.pixels[row, 0].int()
        background = picture[:, :1, :1].clone()
        picture[:, y1:y2, x1:x2] = background
        is_outside = (picture - background).abs() > 24
        assert is_outside.float().mean() < 0.03
        assert (x2 - x1) * (y2 - y1) < 0.8 * 32**2
        assert boxes[0][4] == [16, 16, 32, 32]


W = 6  # width of a feature


def write_h5(folder, split, names):
    """Features of seven regions and of frames, and boxes, of these videos."""
    draws = np.random.default_rng(0)
    shape = (len(names), 8, 4)
    corner = draws.uniform(0, 100, (*shape, 7, 2))
    size = draws.uniform(5, 90, corner.shape)
    boxes = np.concatenate([corner, corner + size], -1)
    regions = draws.normal(size=(*shape, 7, W))
    frames = draws.normal(size=(*shape, W))
    files = {
        f"region_feat_n/acregion_8c7b_{split}.h5": {"feat": regions, "bbox": boxes},
        f"frame_feat/app_feat_{split}.h5": {"resnet_features": frames},
    }
    for name, arrays in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(path, "w") as file:
            file["ids"] = names  # they come back as bytes
            for key, array in arrays.items():
                file[key] = array.astype(np.float32)
    return regions, boxes, frames


def place_of(box, size):
    """Corners and area of a box as shares of a frame."""
    width, height = box[2:] - box[:2] + 1
    area = width * height / np.prod(size)
    return [*box / [*size, *size], area]


def test_regions_are_the_numbers_of_their_files(tmp_path):
    """Places are shares of the frame, which is 320 x 240 where its size is not said."""
    regions, boxes, frames = write_h5(tmp_path, "val", ["a", "b"])
    one = 1, 3, 2  # a video, a clip and a frame
    expected = [[*frames[one], 0, 0, 0, 0, 0]]
    for region, box in zip(regions[one][:5], boxes[one]):
        expected.append([*region, *place_of(box, (320, 240))])
    x = Regions(tmp_path, "val", 5, 32)("b").view(8, 4, 6, W + 5)
    assert np.allclose(x[3, 2], expected, rtol=1e-5)


@pytest.mark.parametrize("videos, words", [
    ([], r"acregion_\*_val.h5 is not there"),
    (["a", "b", "a"], "_val.h5: the video a is there twice"),
])
def test_features_that_are_missing_or_there_twice_are_refused(tmp_path, videos, words):
    if videos:
        write_h5(tmp_path, "val", videos)
    with pytest.raises(UserError, match=words):
        Regions(tmp_path, "val", 5, 32)


# --------------------------------------------- runs ------------------------------------------
def test_a_run_on_files_with_captions_and_its_evaluation(tmp_path, capsys):
    """NExT-QA's lists with features for videos, read by a worker."""
    header = "video frame_count width height question answer qid type a0 a1 a2 a3 a4".split()
    for split in ("train", "val", "test"):
        rows = [(9, 3, 96, 64, "who is gone", 0, 9, "DO", *"abcde")]
        for qid in range(8):
            question = f"what is number {qid % 4}"
            rows.append((qid % 4, 3, 96, 64, question, qid % 4, qid, "CW", *"abcde"))
        write_rows(tmp_path / f"{split}.csv", header, rows)
        _, boxes, _ = write_h5(tmp_path / "features", split, list("0123"))
    where = {"data_dir": str(tmp_path), "region_dir": str(tmp_path / "features")}
    data = common.load_data("nextqa", "train", **where, regions=5, frames=8)
    x = data.read(1).view(8, 6, W + 5)
    expected = place_of(boxes[1, 0, 0, 2], (96, 64))  # by the sizes of the list
    assert x[0, 3, W:].tolist() == pytest.approx(expected, rel=1e-5)
    write_rows(tmp_path / "more.csv", ["video", "caption"], [("0.mp4", "a caption")])
    flags = (
        f"--data-dir {tmp_path} --region-dir {tmp_path / 'features'} --extra-captions "
        f"{tmp_path / 'more.csv'} --dataset nextqa --recipe nextqa-vgt --frames 8 --workers 1 "
        "--text-encoder small --text-length 12 --batch-size 4 --meta-batch-size 2").split()
    summary = run_script(mama_qa, tmp_path / "run", *flags, base=VGT)
    test = summary["test"]["nextqa"]
    assert test["questions"] == 8
    assert "1 videos (1 rows) are not in" in capsys.readouterr().out
    result = evaluated(tmp_path / "run", "--tasks", "qa")["nextqa"]
    assert result["metrics"] == test


def test_a_run_learns_margin_and_weights_with_a_frozen_image_encoder(tmp_path):
    run_script(mama_qa, tmp_path / "run", "--meta-every", "1", base=VGT)
    for row in steps(tmp_path / "run"):
        assert row["L"] > row["CE"] > 0
        assert row["loss"] == pytest.approx(row["w"] * row["L"], rel=0.2)
    model = load_file(tmp_path / "run" / "model.safetensors")
    torch.manual_seed(42)
    first = common.VisionEncoder("small", 0, False, 16).state_dict()
    for name, x in first.items():
        assert torch.equal(model[f"vision.{name}"], x)


@pytest.mark.parametrize("flags, words", [
    ("--frames 6", "--qa-model vgt: give --regions, and a multiple of 4 --frames"),
    ("--crop-min 0.5", "boxes are those of the whole frame; give --crop-min 1"),
    ("--dataset nextqa --recipe nextqa-vgt", "--region-dir DIR and --image-encoder regions go"),
    ("--fusion-layers 3", "--fusion-layers: only with --qa-model fusion"),
])
def test_flags_that_do_not_fit_are_refused(flags, words, capsys):
    flags = flags.split()
    assert words in refused(mama_qa.parse_args, [*of_set(VGT, flags), *flags], capsys)
