"""VGT: each step against a loop, its authors' files, runs on moving-emoji and on files."""

import math
from argparse import Namespace

import common
from contrastive.core.processes import UserError
from contrastive.data.regions import Regions
from contrastive.encoders.vgt import VideoGraph, attend_words, crops, sinusoids
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


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -------------------------------------------- steps ------------------------------------------
def attention(layer, x):
    """PostNorm of one sequence (L, width), by torch's own layer."""
    state = {}
    for name, tensor in layer.state_dict().items():
        name = name.replace("qkv.", "self_attn.in_proj_").replace("out", "self_attn.out_proj")
        state[name.replace("fc", "linear")] = tensor
    plain = TransformerEncoderLayer(
        x.shape[1], layer.heads, len(layer.fc1.bias), 0, F.gelu, layer_norm_eps=1e-12)
    plain.load_state_dict(state)
    return plain.double().eval()(x)


def places_by_hand(graph, boxes):
    """Two 1x1 convolutions of all regions with norms over groups of channels: (R, 5) -> (R, d)."""
    y = boxes
    for first in (0, 3):
        convolution = graph.box[first]
        norm = graph.box[first + 1]
        y = y @ convolution.weight[:, :, 0, 0].T + convolution.bias
        y = F.group_norm(y.T[None], 8, norm.weight, norm.bias)
        y = y[0].T.relu()
    return y


def graph_by_hand(graph, nodes, edges):
    """Layers (A + 1) h W + bias of one frame, and their sum with the nodes."""
    h = nodes
    for layer in graph.graph:
        projected = h @ layer.weight
        h = (edges @ projected + layer.bias + projected).relu()
    return nodes + h


@torch.no_grad()
def test_the_graph_against_loops():
    """Steps 1 to 6 of one video of two clips, region by region and frame by frame."""
    torch.manual_seed(0)
    frames = 8
    regions = 5
    width = 6
    dim = 16
    graph = VideoGraph(width, dim, regions, dropout=0.3).double().eval()
    of_frames = draw(1, frames, width)
    of_regions = draw(1, frames, regions, width, seed=1)
    boxes = draw(1, frames, regions, 5, seed=2)
    output = graph(of_frames, of_regions, boxes)[0]

    places = places_by_hand(graph, boxes.view(-1, 5)).view(frames, regions, -1)
    x = torch.cat([of_regions[0], places], -1)
    x = F.elu(graph.region(x))  # (T, R, d)
    for first in (0, 4):
        clip = x[first:first + 4]
        nodes = [attention(graph.nodes, clip[:, r]) for r in range(regions)]
        clip = torch.stack(nodes, 1)
        raw = graph.key(clip) @ graph.query(clip).transpose(1, 2)
        # first whole, then by rows
        edges = attention(graph.edges, raw.view(4, -1))
        edges = edges.view(4, regions, regions).softmax(-1)
        for t in range(4):
            nodes = graph_by_hand(graph, clip[t], edges[t])
            pooled = graph.weight(nodes)[:, 0].softmax(0) @ nodes
            frame = F.gelu(graph.frame(of_frames[0, first + t]))
            frame = F.layer_norm(frame, (dim,), graph.norm.weight, graph.norm.bias, 1e-12)
            expected = F.elu(graph.merge(torch.cat([frame, pooled])))
            assert_close(output[first + t], expected, 1e-9)


def test_words_past_a_text_s_length_and_absent_choices_have_no_part():
    video = draw(2, 3, 4)
    words = draw(2, 3, 5, 4, seed=1)
    lengths = (3, 5)
    choices = (2, 3)
    mask = torch.arange(5) < torch.tensor(lengths)[:, None, None]
    mask = mask.expand(2, 3, 5)
    choice_mask = torch.arange(3) < torch.tensor(choices)[:, None]
    output = attend_words(video, words, mask, choice_mask)
    for b in range(2):
        for n in range(3):
            query = video[b, n]
            sums = []
            for c in range(choices[b]):
                text = words[b, c, :lengths[b]]
                sums.append(query + (text @ query).softmax(0) @ text)
            assert_close(output[b, n], torch.stack(sums).amax(0))


def test_sinusoids_of_places():
    table = sinusoids(3, 6, draw(1))
    assert table[0].tolist() == [0, 1] * 3
    period = 10_000 ** (2 / 6)
    assert table[2, 3].item() == pytest.approx(math.cos(2 / period))
    assert table[1, 4].item() == pytest.approx(math.sin(1 / period**2))


@pytest.mark.parametrize("token, model, text", [
    ("</s>", "vgt", "q </s> a"), (None, "vgt", "q a"), ("[SEP]", "fusion", "q a")])
def test_a_question_and_its_choice_are_parted_by_the_token_of_the_text_encoder(
        token, model, text):
    tokenizer = Namespace(tokenizer=Namespace(sep_token=token))
    assert choice_texts(["q"], [["a"]], model, tokenizer) == [text]


# ------------------------------------------ the model ----------------------------------------
def vgt_of(tokenizer, answers=()):
    torch.manual_seed(0)
    questions = {"answers": list(answers), "model": "vgt", "regions": 5}
    return model_of(tokenizer, image_size=16, questions=questions).eval()


def questions_of(tokenizer):
    """Two questions with boxes."""
    corner = torch.rand(2, 4, 5, 2) * 8
    question = tokenizer(["a b", "c d e f"])
    return question | {"boxes": torch.cat([corner, corner + 4], -1)}


def choices_of(tokenizer):
    """Two choices of the first question and three of the second."""
    texts = ["b", "c d e f a b", "", "f", "e", "d"]
    choices = tokenizer([f"a [SEP] {text}" for text in texts])
    choices = {name: x.unflatten(0, (2, 3)) for name, x in choices.items()}
    return choices | {"choice_mask": torch.tensor([[True, True, False], [True] * 3])}


@torch.no_grad()
def test_a_batch_scores_as_its_rows_alone(tokenizer):
    model = vgt_of(tokenizer)
    pixels = torch.randn(2, 4, 3, 16, 16)
    question = questions_of(tokenizer)
    choices = choices_of(tokenizer)
    video, _, scores = model(pixels, None, question, choices)
    assert scores.isneginf().tolist() == [[False, False, True], [False] * 3]
    for row, number in ((0, 2), (1, 3)):
        length = choices["attention_mask"][row, :number].sum(-1).max()
        one = slice(row, row + 1)
        part = {"choice_mask": choices["choice_mask"][one, :number]}
        for name in ("input_ids", "attention_mask"):
            part[name] = choices[name][one, :number, :length]
        of_row = {name: x[one] for name, x in question.items()}
        video_alone, _, scores_alone = model(pixels[one], None, of_row, part)
        assert_close(scores_alone[0], scores[row, :number])
        assert_close(video_alone[0], video[row])


@torch.no_grad()
def test_scores_are_dot_products_of_the_video_and_the_choices(tokenizer):
    model = vgt_of(tokenizer)
    pixels = torch.randn(2, 4, 3, 16, 16)
    question = questions_of(tokenizer)
    choices = choices_of(tokenizer)
    _, _, scores = model(pixels, None, question, choices)
    video = model.graph(*model.graph_inputs(pixels, question["boxes"]))
    texts = {name: choices[name] for name in ("input_ids", "attention_mask")}
    words, means = model.read(texts)
    mask = choices["attention_mask"].bool()
    rest = words, mask.any(1, keepdim=True).expand_as(mask), choices["choice_mask"]
    answer = model.summary(video, *rest)
    assert_close(scores[1], means[1] @ answer[1])
    assert_close(means[0, 0], words[0, 0, mask[0, 0]].mean(0))
    model.at_frames = True  # TGIF-QA's action and transition
    early = model.summary(video, *rest)
    model.at_frames = False
    assert torch.equal(early, model.summary(attend_words(video, *rest), *rest))
    assert not torch.allclose(early, answer)


@torch.no_grad()
def test_answers_of_the_vocabulary_by_hand(tokenizer):
    """The product of the scores of video and question."""
    model = vgt_of(tokenizer, ["yes", "no", "two"])
    pixels = torch.randn(2, 4, 3, 16, 16)
    question = questions_of(tokenizer)
    _, _, scores = model(pixels, tokenizer(["a", "b"]), question)
    boxes = question.pop("boxes")
    words, of_question = model.read(question)
    mask = question["attention_mask"].bool()[:, None]
    video = model.graph(*model.graph_inputs(pixels, boxes))
    video = model.summary(video, words[:, None], mask, mask.any(-1))
    answers = model.cached_vocabulary
    assert_close(scores, (video @ answers.T) * (of_question @ answers.T))
    assert model.train().cached_vocabulary is None


def test_a_crop_shows_its_box():
    frame = torch.arange(64.0).view(1, 1, 8, 8).expand(1, 3, 8, 8)
    boxes = torch.tensor([[[0.0, 0, 8, 8], [4, 0, 8, 4]]])
    whole, quarter = crops(frame, boxes)[0]
    assert_close(whole, frame[0], 1e-4)
    small = F.interpolate(frame[:, :, :4, 4:], scale_factor=2, mode="bilinear")[0]
    # borders see beyond the box
    difference = (quarter - small)[:, 1:-1, 2:-2]
    assert difference.abs().max() < 1e-3


def test_the_first_box_of_moving_emoji_holds_the_drawing():
    data = common.load_data(
        "moving-emoji", "val", clips=(64, 24, 24), frames=4, image_size=32, regions=5)
    boxes = torch.tensor(data.column("boxes")).flatten(0, 1)  # (96, 5, 4)
    pixels = data.pixels.flatten(0, 1).float()
    drawings = (pixels - pixels[..., :1, :1]).abs().amax(1) > 24  # (96, 32, 32)
    num_inside = area = 0
    first_boxes = boxes[:, 0].round().int().tolist()
    for drawing, box in zip(drawings, first_boxes):
        x1, y1, x2, y2 = [max(0, side) for side in box]
        num_inside += drawing[y1:y2, x1:x2].sum()
        area += drawing[y1:y2, x1:x2].numel()
    assert num_inside > 0.95 * drawings.sum()
    assert area < 0.6 * drawings.numel()
    assert boxes[0, 1].tolist() == [0, 0, 16, 16]
    assert boxes[0, 4].tolist() == [16, 16, 32, 32]


# -------------------------------------------- files ------------------------------------------
W = 6  # width of a feature
N = 7  # boxes of a frame


def write_h5(folder, split, names):
    """Features of regions and frames, and boxes, of these videos."""
    draws = np.random.default_rng(0)
    shape = (len(names), 8, 4)
    corner = draws.uniform(0, 100, (*shape, N, 2))
    size = draws.uniform(5, 90, corner.shape)
    boxes = np.concatenate([corner, corner + size], -1)
    regions = draws.normal(size=(*shape, N, W))
    frames = draws.normal(size=(*shape, W))
    (folder / "region_feat_n").mkdir(parents=True, exist_ok=True)
    (folder / "frame_feat").mkdir(exist_ok=True)
    with h5py.File(folder / "region_feat_n" / f"acregion_8c{N}b_{split}.h5", "w") as file:
        file["ids"] = names  # they come back as bytes
        file["feat"] = regions.astype(np.float32)
        file["bbox"] = boxes.astype(np.float32)
    with h5py.File(folder / "frame_feat" / f"app_feat_{split}.h5", "w") as file:
        file["ids"] = names
        file["resnet_features"] = frames.astype(np.float32)
    return regions, boxes, frames


def place_of(box, width, height):
    """Corners and area of a box as shares of a frame."""
    x1, y1, x2, y2 = box
    area = (x2 - x1 + 1) * (y2 - y1 + 1) / (width * height)
    return [x1 / width, y1 / height, x2 / width, y2 / height, area]


def test_regions_are_the_numbers_of_their_files(tmp_path):
    """Places are shares of the frame, which is 320 x 240 where its size is not said."""
    regions, boxes, frames = write_h5(tmp_path, "val", ["a", "b"])
    row = 1
    clip = 3
    t = 2
    size = (320, 240)
    reader = Regions(tmp_path, "val", 5, 32)
    x = reader("b").view(8, 4, 6, W + 5)[clip, t]
    expected = [*frames[row, clip, t], 0, 0, 0, 0, 0]
    assert x[0].tolist() == pytest.approx(expected)
    for k in range(5):
        place = place_of(boxes[row, clip, t, k], *size)
        expected = [*regions[row, clip, t, k], *place]
        assert x[1 + k].tolist() == pytest.approx(expected, rel=1e-5)


def test_features_that_are_missing_or_there_twice_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"acregion_\*_val.h5 is not there"):
        Regions(tmp_path, "val", 5, 32)
    write_h5(tmp_path, "val", ["a", "b", "a"])
    with pytest.raises(UserError, match="_val.h5: the video a is there twice"):
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
    place = place_of(boxes[1, 0, 0, 2], 96, 64)  # by the sizes of the list
    x = data.read(1).view(8, 6, W + 5)
    assert x[0, 3, W:].tolist() == pytest.approx(place, rel=1e-5)
    write_rows(tmp_path / "more.csv", ["video", "caption"], [("0.mp4", "a caption")])
    flags = ["--data-dir", tmp_path, "--region-dir", tmp_path / "features"]
    flags += ["--extra-captions", tmp_path / "more.csv"]
    flags += (
        "--dataset nextqa --recipe nextqa-vgt --frames 8 --workers 1 --text-encoder small "
        "--text-length 12 --batch-size 4 --meta-batch-size 2").split()
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
