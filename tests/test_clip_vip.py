"""CLIP-ViP's tower: its attention against a mask and loops, one frame against CLIP, its released names, whole runs."""

import common
from contrastive import encoders
from contrastive.engine.processes import UserError

import pytest
import torch
import torch.nn.functional as F
from transformers import CLIPModel

import eval as eval_py
import mama
from helpers import run_script, steps, write_captions
from test_models import SPEC


@pytest.fixture
def clip(tiny, tokenizer):
    """The folder of a tiny CLIP, the model, and its tokenizer."""
    return *tiny("clip"), tokenizer


def tower_of(clip, **more):
    torch.manual_seed(1)
    tower = encoders.clip_vip.ClipViP(clip[1].vision_model, **more).eval()
    torch.nn.init.normal_(tower.temporal)
    return tower


def model_of(clip, text=None, **more):
    spec = SPEC | dict(image_encoder=f"clip_vip:{clip[0]}", text_encoder=text or str(clip[0]), text_pooling="cls",
                       image_stats="encoder") | more
    return common.build_model(spec, clip[2], True)[0].eval()


def published(config, times=12, proxies=3):
    """A state dict with the names and shapes of the released files: VidCLIP, whose `clipmodel` is the authors'."""
    shapes = {k: v.shape for k, v in CLIPModel(config).state_dict().items()}
    places = shapes["vision_model.embeddings.position_embedding.weight"][0], config.text_config.max_position_embeddings
    width = config.vision_config.hidden_size
    shapes |= {"vision_model.embeddings.added_cls": (proxies, width),
               "vision_model.embeddings.temporal_embedding": (1, times, width),
               "vision_model.embeddings.position_ids": (1, places[0]),
               "text_model.embeddings.position_ids": (1, places[1])}
    return {f"clipmodel.{k}": torch.randn(shape) * 0.1 for k, shape in shapes.items()}


# ---------------------------------------------------- the tower -----------------------------------------------------
@pytest.mark.parametrize("frames", [1, 3])
def test_attention_against_loops(clip, frames):
    """Each query over the keys that it may see, one at a time, in float64."""
    M, L, T, width = 4, 5, frames, 24
    attention = clip[1].vision_model.encoder.layers[0].self_attn
    x = torch.randn(2, M + T * L, width)
    q, k, v = (F.linear(x.double(), p.weight.double(), p.bias.double()).unflatten(2, (2, 12))
               for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    frame_of = [-1] * M + [t for t in range(T) for _ in range(L)]
    out = torch.zeros(2, M + T * L, 2, 12, dtype=torch.float64)
    for b in range(2):
        for i, mine in enumerate(frame_of):
            seen = [j for j, other in enumerate(frame_of) if -1 in (mine, other) or mine == other]
            assert len(seen) == (M + T * L if i < M else M + L)
            for h in range(2):
                weight = torch.softmax(k[b, seen, h] @ q[b, i, h] / 12 ** 0.5, 0)
                out[b, i, h] = weight @ v[b, seen, h]
    expected = F.linear(out.flatten(2), attention.out_proj.weight.double(), attention.out_proj.bias.double())
    assert torch.allclose(encoders.clip_vip.attend(attention, x, M, T).double(), expected, atol=1e-5)


def test_one_frame_without_proxies_is_clip_and_the_order_of_frames_counts(clip):
    pixels, clips, tower = torch.randn(3, 3, 32, 32), torch.randn(2, 3, 3, 32, 32), tower_of(clip)
    with torch.no_grad():
        expected = clip[1].vision_model(pixel_values=pixels).pooler_output
        alone = encoders.clip_vip.ClipViP(clip[1].vision_model, proxies=0).eval()   # its temporal embedding is 0
        for images in (pixels, pixels[:, None]):
            assert torch.allclose(alone(images), expected, atol=1e-5)
        assert not torch.allclose(tower(pixels), expected, atol=1e-3)
        assert not torch.allclose(tower(clips), tower(clips.flip(1)), atol=1e-4)
        (x, M, T), token = tower.embed(clips), clip[1].vision_model.embeddings.class_embedding
        place = clip[1].vision_model.embeddings.position_embedding.weight[0]
    assert (M, T) == (4, 3) and x.shape == (2, 4 + 3 * 4, 24)
    assert torch.allclose(x[0, :4], torch.cat([token[None], tower.added_cls]) + place)


def test_frames_between_those_the_weights_know(clip):
    """Twelve as they are; 24 and 6 by torch's line, whose ends are not moved out."""
    tower = tower_of(clip)
    time = {T: tower.embed(torch.zeros(1, T, 3, 32, 32))[0][0, 4:].unflatten(0, (T, 4))[:, 0] for T in (6, 12, 24)}
    base = time[12] - tower.temporal
    assert torch.allclose(base, base[:1].expand(12, -1), atol=1e-5)
    assert torch.allclose(time[6] - base[0], tower.temporal.unflatten(0, (6, 2)).mean(1), atol=1e-5)
    quarter = 0.75 * tower.temporal[:-1] + 0.25 * tower.temporal[1:]
    assert torch.allclose(time[24][1:-1:2] - base[0], quarter, atol=1e-5)


# ---------------------------------------------------- released weights ----------------------------------------------
def test_a_released_file_is_read_to_its_last_tensor(clip, tmp_path, capsys):
    state, model = published(clip[1].config), model_of(clip)
    torch.save({k: v.half() if "fc1" in k else v for k, v in state.items()}, tmp_path / "a.pt")
    encoders.weights.init_from(model, tmp_path / "a.pt")
    said = capsys.readouterr().out
    assert f"{len(model.state_dict())} of {len(model.state_dict())} tensors read" in said
    reference = CLIPModel(clip[1].config).eval()                           # the same numbers by transformers' names
    plain = {k.removeprefix("clipmodel."): v for k, v in state.items()}
    assert not reference.load_state_dict(plain, strict=False).missing_keys
    tokens = clip[2](["red apple", "green pear"])
    with torch.no_grad():
        text = reference(pixel_values=torch.zeros(2, 3, 32, 32), **tokens).text_embeds
        assert torch.allclose(common.normalize(model(tokens=tokens)[1]), text, atol=2e-3)
    assert torch.equal(model.vision.body.temporal, plain["vision_model.embeddings.temporal_embedding"][0])
    assert torch.equal(model.vision.body.added_cls, plain["vision_model.embeddings.added_cls"])


def test_a_released_file_that_does_not_fit(clip, tmp_path):
    config, file = clip[1].config, tmp_path / "a.pt"
    state = published(config)
    for tensors, words, more in (
            ({k: v for k, v in state.items() if "post_layernorm.bias" not in k},
             r"1 of its .* first vision.body.clip.post_layernorm.bias \(24,\)", {}),
            (published(config, proxies=1), r"first vision.body.added_cls \(1, 24\)", {}),
            (state, "first vision.projection.weight", {"embed_dim": 8}),
            (state, "load it into --image-encoder clip_vip:", {"image_encoder": clip[0]})):
        torch.save(tensors, file)
        with pytest.raises(UserError, match=words):
            encoders.weights.init_from(model_of(clip, **more), file)
    read = encoders.weights.init_from(model_of(clip, text="small", text_pooling="mean"), file)
    assert not [name for name in read if name.startswith("text.")]


# ---------------------------------------------------- runs ----------------------------------------------------------
def flags(clip, folder, *more):
    return ["--cpu", "--clips", "32", "16", "16", "--batch-size", "16", "--log-every", "1",
            "--image-encoder", f"clip_vip:{clip[0]}", "--text-encoder", str(clip[0]), "--pretrained", "--text-length",
            "12", "--embed-dim", "16", "--image-stats", "encoder", "--output-dir", str(folder), *more]


def test_a_run_with_the_look_ahead_loads_and_evaluates(clip, tmp_path):
    weights, images = str(tmp_path / "a.pt"), str(write_captions(tmp_path / "images", 60))
    torch.save(published(clip[1].config), weights)
    pair = ["--image-encoder", f"clip_vip:{clip[0]}", "--text-encoder", str(clip[0])]
    flags = [*pair, *"--clips 32 16 16 --batch-size 16 --log-every 1 --pretrained --text-length 12 --embed-dim 16 "
             "--image-stats encoder --frames 3 --max-steps 2 --meta-size 8 --meta-batch-size 4 --cpu".split()]
    summary = run_script(mama, tmp_path / "run", *flags, "--init-from", weights)
    ahead = [row["w"] for row in steps(tmp_path / "run")]
    assert len(ahead) == 2 and 0 < ahead[0] != ahead[1] < 1

    def evaluate(*these):
        these = [*these, "--cpu", "--tasks", "retrieval", "--output-dir", str(tmp_path / "eval")]
        result, = eval_py.main(eval_py.parse_args(these))["datasets"].values()
        return result["metrics"]["text_to_image"]
    assert evaluate("--checkpoint", str(tmp_path / "run")) == summary["test"]["moving-emoji"]["text_to_image"]
    released = ["--checkpoint", f"clip_vip:{clip[0]}", "--init-from", weights]
    assert evaluate(*released, "--datasets", images)["R@50"] > 0
