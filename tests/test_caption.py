"""tools.caption and tools.paraphrase: key frames, and words of tiny models of real mp4s."""

import json
import math
from types import SimpleNamespace

from contrastive.core.processes import UserError
from contrastive.encoders.texts import train_wordpiece
from contrastive.papers.text_pairs import Paraphrases

import numpy as np
import pytest
import torch
import transformers

import launch
import mama
from helpers import (
    TEXT, all_rows, frame, numbers, write_captions, write_images, write_rows, write_video)
from tools import caption, paraphrase


# ------------------------------------------------------- key frames -------------------------------
def peaks_by_loop(features, k, q):
    """Eqs. 14-15 word by word, in logarithms, since exp underflows. No two frames may be equally
    dense."""
    n = len(features)
    distances = [[math.dist(x, y) ** 2 for y in features] for x in features]
    log_densities = []
    for j in range(n):
        nearest = sorted(distances[j])[1 : k + 1]
        log_densities.append(-sum(nearest) / len(nearest))
    scores = []
    for j in range(n):
        denser = []
        for distance, log_density in zip(distances[j], log_densities):
            if log_density > log_densities[j]:
                denser.append(distance)
        gamma = min(denser, default=max(distances[j]))
        scores.append(log_densities[j] + math.log(gamma))
    peaks = sorted(range(n), key=lambda j: -scores[j])
    return sorted(peaks[:q])


@pytest.mark.parametrize("n, k, q, scale", [
    (30, 6, 12, 0.3),
    (9, 2, 1, 0.3),
    (20, 3, 5, 100),
    (4, 6, 2, 1),  # fewer than k
    (5, 6, 12, 1)])  # fewer than q
def test_key_frames_are_the_equations(n, k, q, scale):
    """At scale 100 every exp(-d) is 0 in any float."""
    for seed in range(10):
        x = scale * torch.randn(n, 5, generator=torch.Generator().manual_seed(seed))
        expected = peaks_by_loop(x.double().tolist(), k, q)
        assert mama.key_frames(x, k, q).tolist() == expected


def test_still_shots_are_one_key_frame():
    still = torch.zeros(20, 3)
    moving = torch.randn(10, 3, generator=torch.Generator().manual_seed(2))
    frames = mama.key_frames(torch.cat([still, moving]), q=6)
    assert len(frames) == 6
    assert frames[0] == 0
    assert frames[1] >= 20


def test_key_frames_of_features_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="finite"):
        mama.key_frames(torch.full((3, 2), math.nan), q=1)


def test_picture_shows_frames_from_left_to_right_and_top_to_bottom_in_a_square():
    frames = 20 * torch.arange(12).byte()[:, None, None, None]
    frames = frames.expand(12, 3, 10, 16)
    picture = np.asarray(caption.grid_picture(frames, 3))
    assert picture.shape == (48, 48, 3)
    assert (picture[[0, 3, 44, 47]] == caption.GREY).all()
    cells = picture[4:44:10, ::16, 0]
    assert cells.tolist() == [[0, 20, 40], [60, 80, 100], [120, 140, 160], [180, 200, 220]]


def test_frames_of_a_short_video_are_repeated_in_order(videos):
    features = caption.frame_features("colour", "cpu")
    frames = caption.read_candidates(videos / "a.mp4", None, None, 16)  # five different ones
    frames = caption.choose_key_frames(frames, features, 12)
    assert numbers(frames) == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4]


# ------------------------------------------------------- captions ---------------------------------
SIZES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
FLAGS = "--grid 2 2 --candidates 8 --frame-encoder colour --max-new-tokens 6 --batch 2 --cpu"
TEMPLATE = """{{ bos_token }}{% for message in messages %}user {% if message['content'] is string %}
{{- message['content'] }}{% else %}{% for part in message['content'] %}
{%- if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endif %}{% endfor %} assistant"""


@pytest.fixture(scope="module")
def prompt_words():
    """A tokenizer of the prompts' words, with a token for a picture."""
    texts = [caption.PROMPT, caption.SUMMARY_PROMPT, "user assistant : question answer"]
    tokenizer = train_wordpiece(texts * 3)
    tokenizer.add_special_tokens({
        "bos_token": "[CLS]", "eos_token": "[SEP]", "additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_model(model, processor, folder):
    """A random model that says something else of other inputs, as a user has it."""
    torch.manual_seed(5)  # of others some models say nothing
    for p in model.parameters():
        if p.ndim > 1:
            p.data.normal_(std=0.2)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def llama_config(prompt_words):
    return transformers.LlamaConfig(**SIZES, **IDS, vocab_size=len(prompt_words))


@pytest.fixture(scope="module")
def llama(prompt_words, tmp_path_factory):
    model = transformers.LlamaForCausalLM(llama_config(prompt_words))
    return save_model(model, prompt_words, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llava(prompt_words, tmp_path_factory):
    vision = transformers.CLIPVisionConfig(
        **SIZES | {"num_hidden_layers": 2}, image_size=32, patch_size=16, projection_dim=16)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=llama_config(prompt_words),
        image_token_index=prompt_words.convert_tokens_to_ids("<image>"))
    pixels = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32)
    processor = transformers.LlavaProcessor(
        pixels, prompt_words, patch_size=16, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=TEMPLATE)
    model = transformers.LlavaForConditionalGeneration(config)
    return save_model(model, processor, tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Four clips in other colours, one of them in a folder, and one that is no video; no captions.
    """
    root = tmp_path_factory.mktemp("videos")
    write_video(root / "a.mp4", range(5))
    write_video(root / "b.mp4", range(40, 52))
    write_video(root / "c.mp4", [np.roll(frame(i), 2, -1) for i in range(24)])
    write_video(root / "inside" / "d.mp4", [255 - frame(i) for i in range(18)])
    (root / "z.mp4").write_bytes(TEXT)
    return root


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """[(picture, words)] of what is drawn."""
    pictures = []

    def draw_nothing(clips, *_, **__):
        pictures.extend(clips)

    monkeypatch.setattr(caption, "draw_clips", draw_nothing)
    return pictures


def flags_of(dataset, out, model, *flags):
    """The command line of a small call."""
    words = ["--dataset", dataset, "--out", out, "--model", model, *FLAGS.split(), *flags]
    return [*map(str, words)]


def run(dataset, out, model, *flags):
    """Runs the tool. Returns: the text of its csv."""
    caption.main(flags_of(dataset, out, model, *flags))
    return out.read_text(encoding="utf8")


def test_csv_of_captions_is_read_as_training_data(llava, videos, tmp_path, drawn):
    run(videos, tmp_path / "a.csv", llava)
    data = all_rows(tmp_path / "a.csv", video_dir=str(videos), frames=2)
    assert data.column("key") == ["a.mp4", "b.mp4", "c.mp4", "inside/d.mp4"]
    texts = list(data.first_captions())
    assert all(texts)
    assert len(set(texts)) > 1  # the pictures matter
    assert "sentence for the video" not in "".join(texts)  # what was asked is no answer
    report = json.loads((tmp_path / "a.csv.json").read_text())
    assert report["captions"] == 4
    assert report["without"][0]["video"] == "z.mp4"
    _, words = drawn[0]
    assert words.split() == texts[0].split()
    assert len(drawn) == 4


def test_captions_of_frames_are_summed_up_by_another_model():
    frames = torch.arange(8, dtype=torch.uint8)[:, None, None, None].expand(8, 3, 4, 4)
    prompts = []

    def caption_model(questions, pictures):
        return [f"frame {picture.getpixel((0, 0))[0]}" for picture in pictures]

    def summary_model(questions):
        prompts.extend(questions)
        return ["first", "second"]

    clips = [frames[:4], frames[4:]]
    assert caption.caption_clips(clips, 2, caption_model, summary_model) == ["first", "second"]
    assert "order of time:\nframe 4\nframe 5\nframe 6\nframe 7\n" in prompts[1]


def test_answer_does_not_depend_on_longer_prompts_beside_it(llama):
    options = SimpleNamespace(dtype="float32", device="cpu", temperature=0, max_new_tokens=6)
    model = caption.language_model(llama, options)
    prompts = ["a video", caption.PROMPT, "image"]
    alone = [model([prompt])[0] for prompt in prompts]
    assert model(prompts) == alone
    assert len(set(alone)) > 1


def test_captions_are_greedy_or_sampled_by_the_seed(llava, videos, tmp_path):
    greedy = run(videos, tmp_path / "1.csv", llava)
    assert run(videos, tmp_path / "2.csv", llava, "--batch", 5, "--seed", 1) == greedy
    sampled = run(videos, tmp_path / "3.csv", llava, "--temperature", 1.5, "--seed", 1)
    other = run(videos, tmp_path / "4.csv", llava, "--temperature", 1.5, "--seed", 2)
    assert len({greedy, sampled, other}) == 3


def test_two_processes_write_what_one_writes_and_a_stopped_call_goes_on(
        llava, videos, tmp_path, monkeypatch):
    whole = run(videos, tmp_path / "one.csv", llava, "--temperature", 1)
    two = tmp_path / "two.csv"
    words = flags_of(videos, two, llava, "--temperature", 1)
    ended = launch.ranks(tmp_path, lambda rank: caption.main(words))
    assert [code for code, _ in ended] == [0, 0], ended
    assert two.read_text(encoding="utf8") == whole
    two.unlink()
    (tmp_path / "two.csv.0.jsonl").unlink()  # each has its own part
    with open(tmp_path / "two.csv.1.jsonl", "a") as part:
        part.write('{"video": "a.mp4", "star')  # killed in the middle of a line
    names = []
    read_candidates = caption.read_candidates

    def recording_read(path, *options):
        names.append(path.name)
        return read_candidates(path, *options)

    monkeypatch.setattr(caption, "read_candidates", recording_read)
    caption.main(words)
    assert two.read_text(encoding="utf8") == whole
    assert names == ["a.mp4", "b.mp4", "z.mp4"]


def test_caption_overrides_a_failure_of_another_process(tmp_path):
    for rank, texts in enumerate((["words", ""], ["", "words"])):
        with open(tmp_path / f"c.csv.{rank}.jsonl", "w") as file:
            for video, text in enumerate(texts):
                row = {"video": video, "start": None, "end": None, "caption": text}
                file.write(json.dumps(row) + "\n")
    rows = caption.read_rows(str(tmp_path / "c.csv")).values()
    assert [row["caption"] for row in rows] == ["words", "words"]


@pytest.mark.parametrize("flags, words", [
    ("--candidates 9", "was made with other settings"),
    ("--dataset {videos}/inside", "of videos in another folder"),
    ("--frame-encoder small --out {other}", "has no published weights"),
    ("--dataset {own} --out {other}", "has no video files"),
    ("--out {own}", "name another file")])
def test_what_cannot_be_is_refused(flags, words, llava, videos, tmp_path):
    own = write_captions(tmp_path, 6, "own.csv")
    before = own.read_text()
    run(videos, tmp_path / "captions.csv", llava)
    flags = flags.format(videos=videos, own=own, other=tmp_path / "other.csv")
    with pytest.raises(UserError, match=words):
        run(videos, tmp_path / "captions.csv", llava, *flags.split())
    assert own.read_text() == before


# ------------------------------------------------------- paraphrases ------------------------------
@pytest.fixture(scope="module")
def t5(prompt_words, tmp_path_factory):
    config = transformers.T5Config(
        vocab_size=len(prompt_words), d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2,
        decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config)
    return save_model(model, prompt_words, tmp_path_factory.mktemp("t5"))


@pytest.fixture
def own(tmp_path):
    """A csv of five captions, one of them twice."""
    write_images(tmp_path, range(5))
    return write_rows(tmp_path / "own.csv", ["image", "caption", "split"], [
        ("000.png", "a cat", "train"),
        ("001.png", "a dog sat", "train"),
        ("002.png", "a cat", "train"),
        ("003.png", "the red cow", "train"),
        ("004.png", "on a mat", "train")])


def write_paraphrases(own, model, out):
    """Runs the tool. Returns: the lines of its file."""
    words = ["--dataset", own, "--batch", 2, "--cpu", "--model", model, "--out", out]
    paraphrase.main(list(map(str, words)))
    return out.read_text(encoding="utf8").splitlines(keepends=True)


def test_paraphrases_of_each_caption_once_also_after_a_kill(own, t5, tmp_path):
    path = tmp_path / "p.jsonl"
    lines = write_paraphrases(own, t5, path)
    rows = [json.loads(line) for line in lines]
    assert [row["caption"] for row in rows] == ["a cat", "a dog sat", "the red cow", "on a mat"]
    assert {len(row["paraphrases"]) for row in rows} == {5}
    lines[0] = json.dumps(rows[0] | {"paraphrases": ["as before"]}) + "\n"
    path.write_text("".join(lines)[:-200], encoding="utf8")
    assert write_paraphrases(own, t5, path) == lines
    assert Paraphrases(path).get(["a cat"]) == [["as before"]]


def test_paraphrases_of_another_model_are_not_overwritten(own, t5, tmp_path):
    path = tmp_path / "p.jsonl"
    first, *_ = write_paraphrases(own, t5, path)
    path.write_text(first.replace('"by": "', '"by": "other '), encoding="utf8")
    with pytest.raises(UserError, match="has paraphrases by other .*, not by "):
        write_paraphrases(own, t5, path)
