"""tools.caption and tools.paraphrase: key frames, and words of tiny models of real mp4s."""

import csv
import json
import math
import shutil
from types import SimpleNamespace

import common
from contrastive.encoders.texts import train_wordpiece
from contrastive.papers.text_pairs import Paraphrases
from contrastive.core.processes import UserError

import numpy as np
import pytest
import torch

import launch
import mama
from helpers import (
    TEXT, frame, frame_number, open_splits, write_captions, write_images, write_rows, write_video)
from tools import caption, paraphrase

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
FRAMES = {"a": 5, "b": 12, "c": 24, "d": 18}  # clips and their lengths
SMALL = (
    "--grid 2 2 --candidates 8 --frame-encoder colour --max-new-tokens 6 --batch 2 --cpu".split()
)


# ------------------------------------------------------- key frames -------------------------------
def peaks_by_loop(features, k, q):
    """Eqs. 14-15 word by word, in logarithms, since exp underflows.

    No two frames may be equally dense.
    """
    n = len(features)
    squared = [[sum((a - b) ** 2 for a, b in zip(x, y)) for y in features] for x in features]
    log_d = [-sum(sorted(squared[j][l] for l in range(n) if l != j)[:k]) / k for j in range(n)]
    gamma = []
    for j in range(n):
        denser = [squared[j][l] for l in range(n) if log_d[l] > log_d[j]]
        gamma.append(min(denser) if denser else max(squared[j]))
    return sorted(sorted(range(n), key=lambda j: -(log_d[j] + math.log(gamma[j])))[:q])


@pytest.mark.parametrize("n, k, q, scale", [(30, 6, 12, 1 / 3), (9, 2, 1, 1 / 3), (20, 3, 5, 100)])
def test_key_frames_are_the_equations_on_random_features(n, k, q, scale):
    """At scale 100 every exp(-d) is 0 in any float."""
    for seed in range(10):
        x = scale * torch.randn(n, 5, generator=torch.Generator().manual_seed(seed))
        assert mama.key_frames(x, k, q).tolist() == peaks_by_loop(x.double().tolist(), k, q)


def test_still_shots_few_frames_and_equal_frames():
    still = torch.zeros(20, 3)
    moving = torch.randn(10, 3, generator=torch.Generator().manual_seed(2))
    found = mama.key_frames(torch.cat([still, moving]), q=6).tolist()
    assert found[0] == 0
    assert len(found) == 6
    assert all(f >= 20 for f in found[1:])  # a still shot is one key frame
    assert mama.key_frames(torch.zeros(5, 2), q=12).tolist() == [0, 1, 2, 3, 4]
    assert mama.key_frames(torch.zeros(30, 2), q=4).tolist() == [0, 1, 2, 3]  # equal: the first
    # k is capped, lists will do
    assert mama.key_frames([[0.0], [1.0], [5.0]], k=6, q=2).tolist() == [0, 1]
    with pytest.raises(ValueError, match="finite"):
        mama.key_frames(torch.full((3, 2), math.nan), q=1)


def test_the_picture_shows_frames_from_left_to_right_and_top_to_bottom_in_a_square():
    frames = torch.stack([torch.full((3, 10, 16), 20 * i) for i in range(12)]).byte()
    picture = np.asarray(caption.grid_picture(frames, 3))  # 3 wide, 4 high: 48 x 40
    assert picture.shape == (48, 48, 3)
    assert (picture[:4] == caption.GREY).all()
    assert (picture[44:] == caption.GREY).all()
    cells = picture[4:44].reshape(4, 10, 3, 16, 3)
    assert (cells == 20 * np.arange(12).reshape(4, 1, 3, 1, 1)).all()


def test_frames_of_a_short_video_are_repeated_in_order_and_others_are_key_frames(videos):
    features = caption.frame_features("colour", "cpu")
    short = caption.read_candidates(videos / "a.mp4", None, None, 16)  # five different frames
    frames = caption.choose_key_frames(short, features, 12)
    shown = [frame_number(x.permute(1, 2, 0).numpy()) for x in frames]
    assert shown == sorted(shown) and set(shown) == set(range(5)) and len(shown) == 12
    many = caption.read_candidates(videos / "c.mp4", None, None, 24)
    assert torch.equal(
        caption.choose_key_frames(many, features, 4), many[mama.key_frames(features(many), q=4)]
    )


def test_frame_features_of_a_clip_model_have_unit_length(tiny):
    """A CLIP takes pictures of its own size alone."""
    x = caption.frame_features(tiny("clip")[0], "cpu")(
        torch.randint(256, (3, 3, 40, 50), dtype=torch.uint8)
    )
    assert x.shape == (3, 24) and torch.allclose(x.norm(dim=1), torch.ones(3))


# ------------------------------------------------------- captions ---------------------------------
def words_tokenizer():
    """Of the prompts' words, with a token for a picture."""
    words = train_wordpiece(
        [caption.PROMPT, caption.SUMMARY_PROMPT, "user assistant : question answer"] * 3
    )
    words.add_special_tokens(
        {"bos_token": "[CLS]", "eos_token": "[SEP]", "additional_special_tokens": ["<image>"]}
    )
    return words


TEMPLATE = """{{ bos_token }}{% for message in messages %}user {% if message['content'] is string %}
{{- message['content'] }}{% else %}{% for part in message['content'] %}
{%- if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endif %}{% endfor %} assistant"""


def model_of(kind, folder):
    """A random LLaVA, Llama or T5 and its processor, as a user has them."""
    import transformers as T

    words = words_tokenizer()
    tower = SIZES | {"intermediate_size": 16, "image_size": 32, "patch_size": 16}
    llama = T.LlamaConfig(**SIZES, **IDS, vocab_size=len(words), intermediate_size=16)
    image = {"image_token_index": words.convert_tokens_to_ids("<image>")}
    torch.manual_seed(5)  # of others some say nothing
    if kind == "Llama":
        model, processor = T.LlamaForCausalLM(llama), words
    elif kind == "T5":
        config = T.T5Config(
            vocab_size=len(words), d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2
        )
        config.decoder_start_token_id = 0
        model, processor = T.T5ForConditionalGeneration(config), words
    else:
        vision = T.CLIPVisionConfig(**tower | {"num_hidden_layers": 2}, projection_dim=16)
        model = T.LlavaForConditionalGeneration(
            T.LlavaConfig(vision_config=vision, text_config=llama, **image)
        )
        pixels = T.CLIPImageProcessor(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        )
        processor = T.LlavaProcessor(
            pixels,
            words,
            patch_size=16,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    processor.chat_template = TEMPLATE
    for p in model.parameters():  # else it says the same of every picture
        p.data *= 10 if p.ndim > 1 else 1
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return model_of("Llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Four clips, one of them in a folder, and one that is no video; no captions."""
    root = tmp_path_factory.mktemp("videos")
    for k, (name, n) in enumerate(FRAMES.items()):  # in other colours in each clip
        shown = [
            np.roll(frame(i), k, axis=-1) if k < 3 else 255 - frame(40 * k + i) for i in range(n)
        ]
        write_video(root / ("inside" if name == "d" else "") / f"{name}.mp4", shown)
    (root / "z.mp4").write_bytes(TEXT)
    return root


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """[(picture, words)] of what was drawn last."""
    found = []
    monkeypatch.setattr(
        caption, "draw_clips", lambda clips, *_, **__: found.__setitem__(slice(None), clips)
    )
    return found


def words_of(dataset, out, model, *more):
    """The command line of a small call."""
    return [*map(str, ("--dataset", dataset, "--out", out, "--model", model, *SMALL, *more))]


def run(*words):
    """The tool on (dataset, out, model, *flags).   Returns: {video: caption}."""
    caption.main(words_of(*words))
    with open(words[1], newline="", encoding="utf8") as f:
        return {row["video"]: row["caption"] for row in csv.DictReader(f)}


def test_a_csv_of_captions_that_the_scripts_read(llava, videos, tmp_path, capsys, drawn):
    rows = run(videos, tmp_path / "captions.csv", llava)
    assert list(rows) == ["a.mp4", "b.mp4", "c.mp4", "inside/d.mp4"]
    assert all(rows.values()) and len(set(rows.values())) > 1  # the pictures matter
    # what was asked is no answer
    assert not any("sentence for the video" in text for text in rows.values())
    assert "4 captions; 1 clips have none" in capsys.readouterr().out
    report = json.loads((tmp_path / "captions.csv.json").read_text())
    assert report["captions"] == 4 and [x["video"] for x in report["without"]] == ["z.mp4"]
    strip, below = drawn[0]  # Fig. 6: strips of four frames
    assert np.array_equal(
        strip, np.concatenate([*common.read_frames(str(videos / "a.mp4"), 4)], axis=1)
    )
    assert below.split() == rows["a.mp4"].split() and len(drawn) == 4
    splits = open_splits(tmp_path / "captions.csv", video_dir=str(videos), frames=2, image_size=32)
    read = {d.key(i): d.captions(i) for d in splits.values() for i in range(len(d))}
    assert read == {video: [text] for video, text in rows.items()}


def test_captions_of_frames_are_summed_up_by_another_model(llava, videos, tmp_path, monkeypatch):
    asked, true = [], caption.language_model

    def listening(name, args, sees=False):
        answers = true(name, args, sees)
        return answers if sees else lambda texts: asked.extend(texts) or answers(texts)

    monkeypatch.setattr(caption, "language_model", listening)
    rows = run(
        videos,
        tmp_path / "out.csv",
        llava,
        "--summary-model",
        model_of("Llama", tmp_path / "llama"),
    )
    assert rows and not any("Sentences" in text for text in rows.values())
    first = asked[0].split("\n")
    assert first[0] == "Sentences on frames of one video in the order of time:"
    assert len(first) == 6  # four frames
    assert len(asked) == 4


ANSWERS = SimpleNamespace(dtype="float32", device="cpu", temperature=0, max_new_tokens=6)


def test_an_answer_does_not_depend_on_longer_prompts_beside_it(tmp_path):
    """And a prompt begins once, with the first token of the chat template."""
    model = caption.language_model(model_of("Llama", tmp_path), ANSWERS)
    prompts = ["a video", caption.PROMPT, "image"]
    alone = [model([prompt])[0] for prompt in prompts]
    read = []

    def keep_ids(module, inputs):
        if isinstance(module, torch.nn.Embedding):
            read.append(inputs[0])

    with torch.nn.modules.module.register_module_forward_pre_hook(keep_ids):
        assert model(prompts) == alone and len(set(alone)) > 1
    assert (read[0] == IDS["bos_token_id"]).sum(1).tolist() == [1, 1, 1]


def test_greedy_captions_do_not_depend_on_the_batch_and_sampled_ones_on_the_seed(
    llava, videos, tmp_path
):
    greedy = run(videos, tmp_path / "1.csv", llava)
    assert greedy == run(videos, tmp_path / "2.csv", llava, "--batch", 5, "--seed", 1)
    hot = ["--temperature", 1.5, "--seed"]
    sampled = [
        run(videos, tmp_path / f"s{k}.csv", llava, *hot, seed) for k, seed in enumerate((1, 1, 2))
    ]
    assert sampled[0] == sampled[1] != sampled[2] and sampled[0] != greedy


def test_two_processes_write_what_one_writes_and_a_stopped_call_goes_on(
    llava, videos, tmp_path, monkeypatch
):
    run(videos, tmp_path / "one.csv", llava, "--temperature", 1)
    whole, two = (tmp_path / "one.csv").read_bytes(), tmp_path / "two.csv"
    words = words_of(videos, two, llava, "--temperature", 1)
    ended = launch.ranks(tmp_path, lambda rank: caption.main(words))
    assert [code for code, _ in ended] == [0, 0], ended
    assert two.read_bytes() == whole
    two.unlink()
    (tmp_path / "two.csv.0.jsonl").unlink()  # each has its own part
    with open(tmp_path / "two.csv.1.jsonl", "a") as part:
        part.write('{"video": "a.mp4", "star')  # killed in the middle of a line
    read, true = [], caption.read_candidates
    monkeypatch.setattr(
        caption, "read_candidates", lambda path, *more: read.append(path.name) or true(path, *more)
    )
    caption.main(words)
    assert two.read_bytes() == whole and read == ["a.mp4", "b.mp4", "z.mp4"]


def test_a_caption_overrides_a_failure_of_another_process(tmp_path):
    for rank in range(2):
        rows = [
            {"video": k, "start": None, "end": None, "caption": "said" * (k == rank)}
            for k in range(2)
        ]
        (tmp_path / f"c.csv.{rank}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [row["caption"] for row in caption.read_rows(str(tmp_path / "c.csv")).values()] == [
        "said"
    ] * 2


def test_what_cannot_be_is_refused_in_one_line(llava, videos, tmp_path):
    run(videos, tmp_path / "x.csv", llava)
    shutil.copytree(llava, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    own = write_captions(tmp_path / "pictures", 40)
    before = own.read_text()
    for says, *words in (
        ("has no video files", own, tmp_path / "y.csv", llava),
        ("has no chat template", videos, tmp_path / "z.csv", tmp_path / "base"),
        ("has no published weights", videos, tmp_path / "y.csv", llava, "--frame-encoder", "small"),
        ("was made with other settings", videos, tmp_path / "x.csv", llava, "--candidates", 9),
        ("of videos in another folder", videos / "inside", tmp_path / "x.csv", llava),
        ("name another file", videos, own, llava),
    ):
        with pytest.raises(UserError, match=says):
            run(*words)
    assert own.read_text() == before


# ------------------------------------------------------- paraphrases ------------------------------
def test_paraphrases_by_a_model_that_goes_on_with_its_own_file(tmp_path):
    captions = ["a cat", "a dog sat", "a cat", "the red cow", "on a mat"]
    rows = [(name, text, "train") for name, text in zip(write_images(tmp_path, range(5)), captions)]
    own = write_rows(tmp_path / "own.csv", ["image", "caption", "split"], rows)
    path, before = tmp_path / "p.jsonl", own.read_text()
    flags = [
        *f"--dataset {own} --batch 2 --cpu --model".split(),
        model_of("T5", tmp_path / "t5"),
        "--out",
    ]
    with pytest.raises(UserError, match="^--model .*none"):  # and leaves no empty file behind
        paraphrase.main([*flags, str(path), "--model", str(tmp_path / "none")])
    assert not path.exists()
    paraphrase.main([*flags, str(path)])
    lines = path.read_text(encoding="utf8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines]
    # the duplicate once
    assert [r["caption"] for r in rows] == ["a cat", "a dog sat", "the red cow", "on a mat"]
    assert all(len(r["paraphrases"]) == 5 for r in rows)

    done = json.dumps(rows[0] | {"paraphrases": ["kept"] * 5}) + "\n"
    # a kill in the third line
    path.write_text(done + lines[1] + lines[2][: len(lines[2]) // 2], encoding="utf8")
    paraphrase.main([*flags, str(path)])
    assert path.read_text(encoding="utf8").splitlines(keepends=True) == [done, *lines[1:]]
    assert len(Paraphrases(path).hashes) == 4 and Paraphrases(path).get(["a cat"]) == [["kept"] * 5]
    path.write_text(
        path.read_text(encoding="utf8").replace('"by": "', '"by": "other '), encoding="utf8"
    )
    for out, says in (
        (path, "has paraphrases by other .*, not by "),
        (own, "^--out "),
    ):  # own: somebody's data
        with pytest.raises(UserError, match=says):
            paraphrase.main([*flags, str(out)])
    assert own.read_text() == before
