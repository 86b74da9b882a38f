"""VGT: each step against a loop, its authors' files, runs on moving-emoji and on files, errors."""

import math
from argparse import Namespace

import common
from contrastive import evaluation
from contrastive.core.processes import UserError
from contrastive.data.regions import Regions
from contrastive.encoders.models import model_of_spec
from contrastive.encoders.texts import Tokenizer
from contrastive.encoders.vgt import PostNorm, VideoGraph, attend_words, crops, sinusoids

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import helpers
from helpers import of_set, refused, run_script, steps, write_rows
from test_models import SPEC
from variants import mama_qa

VGT = (
    "--cpu --clips 32 8 8 --batch-size 8 --meta-batch-size 4 --meta-size 12 --log-every 1 "
    "--eval-every 0 --max-steps 2 --recipe moving-emoji-vgt --image-size 16 --frames 4 "
    "--embed-dim 32"
).split()


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_question_and_its_choice_are_parted_by_the_token_of_the_text_encoder():
    def of(token, model="vgt"):
        tokenizer = Namespace(tokenizer=Namespace(sep_token=token))
        return evaluation.answers.choice_texts(["q"], [["a", "b"]], model, tokenizer)

    assert [of("</s>"), of(None), of("[SEP]", "fusion")] == [
        ["q </s> a", "q </s> b"],
        ["q a", "q b"],
        ["q a", "q b"],
    ]


# -------------------------------------- steps ------------------------------------------------
def attention(layer, x):
    """PostNorm of one sequence (L, width), by torch's own layer."""
    names = {"qkv.": "self_attn.in_proj_", "out": "self_attn.out_proj", "fc": "linear"}
    state, width = layer.state_dict(), x.shape[1]
    for old, new in names.items():
        state = {k.replace(old, new): v for k, v in state.items()}
    plain = (
        torch.nn.TransformerEncoderLayer(width, layer.heads, len(layer.fc1.bias), 0, F.gelu, 1e-12)
        .double()
        .eval()
    )
    plain.load_state_dict(state)
    return plain(x)


@torch.no_grad()
def test_the_graph_against_loops():
    """Steps 1 to 6 of one video of two clips, region by region and frame by frame."""
    torch.manual_seed(0)
    T, R, W, d = 8, 5, 6, 16
    graph = VideoGraph(W, d, R, dropout=0.3).double().eval()
    frames = numbers(1, T, W)
    regions = numbers(1, T, R, W, seed=1)
    boxes = numbers(1, T, R, 5, seed=2)
    got = graph(frames, regions, boxes)[0]

    y = boxes.view(-1, 5)
    for convolution, norm in ((graph.box[0], graph.box[1]), (graph.box[3], graph.box[4])):
        # groups of channels over all regions:
        y = y @ convolution.weight[:, :, 0, 0].T + convolution.bias
        y = F.group_norm(y.T[None], 8, norm.weight, norm.bias)[0].T.relu()
    x = F.elu(graph.region(torch.cat([regions[0], y.view(T, R, -1)], -1)))  # (T, R, d)
    for clip in range(2):
        here = slice(4 * clip, 4 * clip + 4)
        x[here] = torch.stack([attention(graph.nodes, x[here, r]) for r in range(R)], 1)
        raw = torch.einsum("tid,tjd->tij", graph.key(x[here]), graph.query(x[here]))
        # first whole, then by rows
        edges = attention(graph.edges, raw.view(4, R * R)).view(4, R, R).softmax(-1)
        assert edges.sum(-1).allclose(edges.new_tensor(1))
        for t, A in zip(range(*here.indices(T)), edges):
            h = x[t]
            for layer in graph.graph:
                S = h @ layer.weight
                h = (A @ S + layer.bias + S).relu()
            nodes = x[t] + h
            pooled = torch.softmax(graph.weight(nodes)[:, 0], 0) @ nodes
            frame = F.layer_norm(
                F.gelu(graph.frame(frames[0, t])), (d,), graph.norm.weight, graph.norm.bias, 1e-12
            )
            assert torch.allclose(got[t], F.elu(graph.merge(torch.cat([frame, pooled]))), atol=1e-9)
    assert graph.edges.heads == 5 and PostNorm(16, 5, 8, 0).heads == 4


def test_words_past_a_text_s_length_and_absent_choices_have_no_part():
    video, words = numbers(2, 3, 4), numbers(2, 3, 5, 4, seed=1)
    keep = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])[:, None].expand(2, 3, 5)
    choice_mask = torch.tensor([[True, True, False], [True] * 3])
    found = attend_words(video, words, keep, choice_mask)
    for b in range(2):
        for n in range(3):
            each = []
            for c in range(3 if b else 2):
                some = words[b, c, : 5 if b else 3]
                weight = torch.softmax(torch.stack([video[b, n] @ w for w in some]), 0)
                each.append(video[b, n] + sum(p * w for p, w in zip(weight, some)))
            assert torch.allclose(found[b, n], torch.stack(each).amax(0))
    table = sinusoids(3, 6, words)
    assert table[2, 3].item() == pytest.approx(math.cos(2 / 10_000 ** (2 / 6)))
    assert table[0].tolist() == [0, 1] * 3
    assert table[1, 4].item() == pytest.approx(math.sin(1 / 10_000 ** (4 / 6)))


# -------------------------------------- the model --------------------------------------------
def model_of(answers=(), **more):
    torch.manual_seed(0)
    tokenizer = Tokenizer(common.train_wordpiece(["a b c d e f", "yes no two"]), 12)
    spec = SPEC | {
        "image_size": 16,
        "questions": {"answers": list(answers), "model": "vgt", "regions": 5} | more,
    }
    return model_of_spec(spec, tokenizer, False)[0].eval(), tokenizer


def asked_of(tokenizer, *choices):
    """Questions with boxes and their choices (None: none is there) of len(choices) rows."""
    boxes = torch.rand(len(choices), 4, 5, 2, generator=torch.Generator().manual_seed(4)) * 8
    question = tokenizer(["a b", "c d e f"][: len(choices)]) | {
        "boxes": torch.cat([boxes, boxes + 4], -1)
    }
    tokens = tokenizer([f"a [SEP] {c}" for some in choices for c in some])
    choice_mask = torch.tensor([[c is not None for c in some] for some in choices])
    tokens = {k: v.unflatten(0, choice_mask.shape) for k, v in tokens.items()}
    return question, tokens | {"choice_mask": choice_mask}


@torch.no_grad()
def test_scores_are_dot_products_and_no_row_sees_another():
    """Of a batch as of each row alone."""
    model, tokenizer = model_of()
    pixels = torch.randn(2, 4, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    question, choices = asked_of(tokenizer, ["b", "c d e f a b", None], ["f", "e", "d"])
    f, _, scores = model(pixels, None, question, choices)
    assert scores.isneginf().tolist() == [[False, False, True], [False] * 3]
    for row, many in ((0, 2), (1, 3)):
        short = choices["attention_mask"][row, :many].sum(-1).max()
        one = {
            k: v[row : row + 1, :many] if k == "choice_mask" else v[row : row + 1, :many, :short]
            for k, v in choices.items()
        }
        alone = model(
            pixels[row : row + 1], None, {k: v[row : row + 1] for k, v in question.items()}, one
        )
        assert torch.allclose(alone[2][0], scores[row, :many], atol=1e-5)
        assert torch.allclose(alone[0][0], f[row])
    video = model.graph(*model.look(pixels, question["boxes"]))
    words, g = model.read({k: choices[k] for k in ("input_ids", "attention_mask")})
    keep = choices["attention_mask"].bool()
    rest = words, keep.any(1, keepdim=True).expand_as(keep), choices["choice_mask"]
    answer = model.summary(video, *rest)
    assert torch.allclose(scores[1], g[1] @ answer[1], atol=1e-6)
    model.at_frames = True  # TGIF-QA's action and transition
    early = model.summary(video, *rest)
    model.at_frames = False
    assert torch.equal(early, model.summary(attend_words(video, *rest), *rest))
    assert not torch.allclose(early, answer)
    # a text's own words
    assert torch.allclose(g[0, 0], words[0, 0, : keep[0, 0].sum()].mean(0), atol=1e-6)
    assert not torch.allclose(
        model(pixels, None, question | {"boxes": question["boxes"] / 2}, choices)[2], scores
    )


@torch.no_grad()
def test_answers_of_the_vocabulary_are_encoded_once_an_evaluation():
    model, tokenizer = model_of(["yes", "no", "two"])
    pixels, (question, _) = torch.randn(2, 4, 3, 16, 16), asked_of(tokenizer, ["b"], ["f"])
    answer = model(pixels, tokenizer(["a", "b"]), question)[2]
    g_q, known = model.read(question)[1], model.cached_vocabulary
    words = model.read({k: v[:, None] for k, v in question.items() if k != "boxes"})[0]
    keep = question["attention_mask"].bool()[:, None]
    f = model.summary(
        model.graph(*model.look(pixels, question["boxes"])), words, keep, keep.any(-1)
    )
    assert torch.allclose(answer[1, 2], (f[1] @ known[2]) * (g_q[1] @ known[2]), atol=1e-6)
    model.words.weight.mul_(2)
    assert model.cached_vocabulary is known
    assert model.train().cached_vocabulary is None and not model.vision.training
    assert model.eval().vocabulary() is not known


def test_a_crop_shows_its_box():
    frame = torch.arange(64.0).view(1, 1, 8, 8).expand(1, 3, 8, 8)
    whole, quarter = crops(frame, torch.tensor([[[0.0, 0, 8, 8], [4, 0, 8, 4]]]))[0]
    assert torch.allclose(whole, frame[0], atol=1e-4)
    small = F.interpolate(frame[:, :, :4, 4:], scale_factor=2, mode="bilinear")[0]
    # borders see beyond the box
    assert torch.allclose(quarter[:, 1:-1, 2:-2], small[:, 1:-1, 2:-2], atol=1e-3)


def test_boxes_of_moving_emoji_hold_the_drawing():
    data = common.load_data(
        "moving-emoji", "val", clips=(64, 24, 24), frames=4, image_size=32, regions=5
    )
    boxes = torch.tensor(data.column("boxes"))  # (24, 4, 5, 4)
    ground = data.pixels[:, :, :, :1, :1].float()  # a corner, (24, 4, 3, 1, 1)
    drawn = ((data.pixels.float() - ground).abs().amax(2) > 24).float()  # (24, 4, 32, 32)
    at = torch.arange(32) + 0.5
    low, high = boxes[:, :, 0, :2], boxes[:, :, 0, 2:]  # (24, 4, 2)
    # (24, 4, 2, 32), x and y
    inside = ((at >= low[..., None] - 1) & (at <= high[..., None] + 1)).float()
    mask = inside[:, :, 1, :, None] * inside[:, :, 0, None]  # (24, 4, 32, 32)
    assert (drawn * mask).sum() > 0.98 * drawn.sum() and mask.mean() < 0.6
    assert boxes[0, 0, 1:].tolist() == [
        [0, 0, 16, 16],
        [16, 0, 32, 16],
        [0, 16, 16, 32],
        [16, 16, 32, 32],
    ]


# -------------------------------------- files ------------------------------------------------
W, N = 6, 7  # width of a feature, boxes of a frame in the files


def features(videos):
    rng = np.random.default_rng(0)
    x1 = rng.uniform(0, 100, (videos, 8, 4, N, 2))
    boxes = np.concatenate([x1, x1 + rng.uniform(5, 90, x1.shape)], -1)
    return [
        a.astype(np.float32)
        for a in (rng.normal(size=(videos, 8, 4, N, W)), boxes, rng.normal(size=(videos, 8, 4, W)))
    ]


def write_h5(folder, split, names):
    (
        (folder / "region_feat_n").mkdir(parents=True, exist_ok=True),
        (folder / "frame_feat").mkdir(exist_ok=True),
    )
    feat, bbox, frames = features(len(names))
    with h5py.File(folder / "region_feat_n" / f"acregion_8c{N}b_{split}.h5", "w") as file:
        # ids of text come back as bytes
        file["ids"], file["feat"], file["bbox"] = names, feat, bbox
    with h5py.File(folder / "frame_feat" / f"app_feat_{split}.h5", "w") as file:
        file["ids"], file["resnet_features"] = names, frames


def test_regions_are_the_numbers_of_their_files(tmp_path):
    write_h5(tmp_path, "val", ["11", "b", "c"])
    feat, bbox, frames = features(3)
    read = Regions(tmp_path, "val", 5, 32)
    read.sizes = {"b": (200.0, 100.0)}
    assert read.index() == {"11": "11", "video11": "11", "vid11": "11", "b": "b", "c": "c"}
    for row, name, wide, high in ((1, "b", 200, 100), (2, "c", 320, 240)):
        x = read(name).view(32, 6, W + 5).numpy()
        clip, frame, box = 3, 2, 4
        found, (x1, y1, x2, y2) = x[4 * clip + frame], bbox[row, clip, frame, box]
        assert np.array_equal(found[0], [*frames[row, clip, frame], 0, 0, 0, 0, 0])
        assert np.array_equal(found[1 + box, :W], feat[row, clip, frame, box])
        area = (x2 - x1 + 1) * (y2 - y1 + 1) / (wide * high)
        numbers = [x1 / wide, y1 / high, x2 / wide, y2 / high, area]
        assert found[1 + box, W:] == pytest.approx(numbers, rel=1e-5)
    # two whole clips
    few = Regions(tmp_path, "val", 5, 8)("c").view(2, 4, 6, W + 5)[:, :, 0, :W]
    assert np.array_equal(few, frames[2, [0, 7]])


def test_features_that_are_missing_or_there_twice_end_the_run(tmp_path):
    with pytest.raises(UserError, match=r"acregion_\*_val.h5 is not there"):
        Regions(tmp_path, "val", 5, 32)
    write_h5(tmp_path, "val", ["a", "b", "a"])
    with pytest.raises(UserError, match="_val.h5: the video a is there twice"):
        Regions(tmp_path, "val", 5, 32)
    table = tmp_path / "region_feat_n" / f"acregion_8c{N}b_val.h5"
    table.with_name("acregion_8c20b_val.h5").write_bytes(table.read_bytes())
    with pytest.raises(UserError, match=r"may be .*acregion_8c20b_val.h5 or .*: remove one"):
        Regions(tmp_path, "val", 5, 32)


def test_a_run_on_files_with_captions(tmp_path, capsys):
    """NExT-QA's lists with features for videos, read by a worker; and eval.py."""
    header = "video frame_count width height question answer qid type a0 a1 a2 a3 a4".split()
    for split in ("train", "val", "test"):
        write_rows(
            tmp_path / f"{split}.csv",
            header,
            [
                (k, 3, 96, 64, f"what is number {k}", k % 5, q, ["CW", "DO"][k % 2], *"abcde")
                for q, k in enumerate([0, 1, 2, 3] * 2)
            ]
            + [(9, 3, 96, 64, "who is gone", 0, 9, "DO", *"abcde")],
        )
    for split in ("train", "val", "test"):
        write_h5(tmp_path / "features", split, list("0123"))
    where = {"data_dir": str(tmp_path), "region_dir": str(tmp_path / "features")}
    data = common.load_data("nextqa", "train", **where, regions=5, frames=8)
    expected = features(4)[1][1, 0, 0, 2] / (96, 64, 96, 64)  # by the sizes of the list
    assert data.read(1).view(8, 6, W + 5)[0, 3, W:-1].numpy() == pytest.approx(expected, rel=1e-5)
    (tmp_path / "more.csv").write_text("video,caption\n0.mp4,a caption of the first\n")
    words = (
        "--dataset nextqa --recipe nextqa-vgt --frames 8 --workers 1 --text-encoder small "
        "--text-length 12 --batch-size 4 --meta-batch-size 2"
    )
    flags = ["--data-dir", tmp_path, "--region-dir", tmp_path / "features", *words.split()]
    flags += ["--extra-captions", tmp_path / "more.csv"]
    test = run_script(mama_qa, tmp_path / "run", *flags, base=VGT)["test"]["nextqa"]
    assert test["questions"] == 8 and "1 videos (1 rows) are not in" in capsys.readouterr().out
    assert evaluated(tmp_path / "run") == test


# -------------------------------------- runs -------------------------------------------------
def evaluated(folder):
    """eval.py's numbers of a run on its only set."""
    (result,) = helpers.evaluated(folder, "--tasks", "qa").values()
    return result["metrics"]


def test_a_run_and_its_evaluation(tmp_path):
    """Margin and learnt weights on; the image encoder stays as it is."""
    folder = tmp_path / "run"
    test = run_script(mama_qa, folder, "--meta-every", "1", base=VGT)["test"]["moving-emoji"]
    for row in steps(folder):
        assert row["CE"] > 0
        assert row["L"] > row["CE"]
        assert row["loss"] == pytest.approx(row["w"] * row["L"], rel=0.2)
    whole = load_file(folder / "model.safetensors")
    torch.manual_seed(42)
    first = common.VisionEncoder("small", 0, False, 16).state_dict()
    assert all(torch.equal(whole[f"vision.{k}"], v) for k, v in first.items())
    assert evaluated(folder) == test


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--frames 6", "--qa-model vgt: give --regions, and a multiple of 4 --frames"),
        ("--crop-min 0.5", "boxes are those of the whole frame; give --crop-min 1"),
        ("--dataset nextqa --recipe nextqa-vgt", "--region-dir DIR and --image-encoder regions go"),
        ("--fusion-layers 3", "--fusion-layers: only with --qa-model fusion"),
    ],
)
def test_bad_flags(flags, words, capsys):
    flags = flags.split()
    assert words in refused(mama_qa.parse_args, [*of_set(VGT, flags), *flags], capsys)
