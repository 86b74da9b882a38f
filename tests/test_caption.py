"""tools.caption and tools.paraphrase: key frames, and words of tiny models of real mp4s."""

import csv
import json
import math
import shutil
from types import SimpleNamespace

import common
from contrastive.core.processes import UserError
from contrastive.encoders.texts import train_wordpiece
from contrastive.papers.text_pairs import Paraphrases

import numpy as np
import pytest
import torch

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
        nearest = sorted(distances[j][:j] + distances[j][j + 1 :])[:k]
        log_densities.append(-sum(nearest) / k)
    scores = []
    for j in range(n):
        denser = [distances[j][l] for l in range(n) if log_densities[l] > log_densities[j]]
        gamma = min(denser, default=max(distances[j]))
        scores.append(log_densities[j] + math.log(gamma))
    return sorted(sorted(range(n), key=lambda j: -scores[j])[:q])


@pytest.mark.parametrize("n, k, q, scale", [(30, 6, 12, 1 / 3), (9, 2, 1, 1 / 3), (20, 3, 5, 100)])
def test_key_frames_are_the_equations(n, k, q, scale):
    """At scale 100 every exp(-d) is 0 in any float."""
    for seed in range(10):
        x = scale * torch.randn(n, 5, generator=torch.Generator().manual_seed(seed))
        assert mama.key_frames(x, k, q).tolist() == peaks_by_loop(x.double().tolist(), k, q)


def test_still_shots_are_one_key_frame():
    still = torch.zeros(20, 3)
    moving = torch.randn(10, 3, generator=torch.Generator().manual_seed(2))
    first, *others = mama.key_frames(torch.cat([still, moving]), q=6).tolist()
    assert first == 0
    assert len(others) == 5
    assert min(others) >= 20


@pytest.mark.parametrize("features, k, q, frames", [
    (torch.zeros(5, 2), 6, 12, [0, 1, 2, 3, 4]),  # fewer than q
    (torch.zeros(30, 2), 6, 4, [0, 1, 2, 3]),  # equal: the first
    ([[0.0], [1.0], [5.0]], 6, 2, [0, 1])])  # fewer than k, in lists
def test_key_frames_of_few_or_equal_frames(features, k, q, frames):
    assert mama.key_frames(features, k, q).tolist() == frames


def test_key_frames_of_features_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="finite"):
        mama.key_frames(torch.full((3, 2), math.nan), q=1)


def test_picture_shows_frames_from_left_to_right_and_top_to_bottom_in_a_square():
    frames = torch.stack([torch.full((3, 10, 16), 20 * i) for i in range(12)]).byte()
    picture = np.asarray(caption.grid_picture(frames, 3))  # 3 wide, 4 high: 48 x 40
    assert picture.shape == (48, 48, 3)
    assert (picture[:4] == caption.GREY).all()
    assert (picture[44:] == caption.GREY).all()
    cells = picture[4:44].reshape(4, 10, 3, 16, 3)
    assert (cells == 20 * np.arange(12).reshape(4, 1, 3, 1, 1)).all()


def test_frames_of_a_short_video_are_repeated_in_order(videos):
    features = caption.frame_features("colour", "cpu")
    frames = caption.read_candidates(videos / "a.mp4", None, None, 16)  # five different ones
    frames = caption.choose_key_frames(frames, features, 12)
    shown = numbers(frames)
    assert shown == sorted(shown)
    assert set(shown) == set(range(5))
    assert len(shown) == 12


# ------------------------------------------------------- captions ---------------------------------
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
FLAGS = "--grid 2 2 --candidates 8 --frame-encoder colour --max-new-tokens 6 --batch 2 --cpu"
TEMPLATE = """{{ bos_token }}{% for message in messages %}user {% if message['content'] is string %}
{{- message['content'] }}{% else %}{% for part in message['content'] %}
{%- if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endif %}{% endfor %} assistant"""


def words_tokenizer():
    """Of the prompts' words, with a token for a picture."""
    words = [caption.PROMPT, caption.SUMMARY_PROMPT, "user assistant : question answer"]
    tokenizer = train_wordpiece(words * 3)
    tokenizer.add_special_tokens({
        "bos_token": "[CLS]", "eos_token": "[SEP]", "additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_model(model, processor, folder):
    """A random model that says something else of other inputs, as a user has it."""
    for p in model.parameters():
        if p.ndim > 1:
            p.data *= 10
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def llama_config(tokenizer):
    import transformers as T

    torch.manual_seed(5)  # of others some say nothing
    return T.LlamaConfig(**SIZES, **IDS, vocab_size=len(tokenizer), intermediate_size=16)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    import transformers as T

    tokenizer = words_tokenizer()
    model = T.LlamaForCausalLM(llama_config(tokenizer))
    return save_model(model, tokenizer, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    import transformers as T

    tokenizer = words_tokenizer()
    tower = SIZES | {"intermediate_size": 16, "num_hidden_layers": 2}
    vision = T.CLIPVisionConfig(**tower, image_size=32, patch_size=16, projection_dim=16)
    config = T.LlavaConfig(
        vision_config=vision, text_config=llama_config(tokenizer),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"))
    pixels = T.CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = T.LlavaProcessor(
        pixels, tokenizer, patch_size=16, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=TEMPLATE)
    model = T.LlavaForConditionalGeneration(config)
    return save_model(model, processor, tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Four clips in other colours, one of them in a folder, and one that is no video; no captions.
    """
    root = tmp_path_factory.mktemp("videos")
    for turn, (name, length) in enumerate({"a": 5, "b": 12, "c": 24}.items()):
        write_video(root / f"{name}.mp4", [np.roll(frame(i), turn, -1) for i in range(length)])
    write_video(root / "inside" / "d.mp4", [255 - frame(120 + i) for i in range(18)])
    (root / "z.mp4").write_bytes(TEXT)
    return root


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """[(picture, words)] of what is drawn."""
    pictures = []
    monkeypatch.setattr(caption, "draw_clips", lambda clips, *_, **__: pictures.extend(clips))
    return pictures


def flags_of(dataset, out, model, *flags):
    """The command line of a small call."""
    words = ["--dataset", dataset, "--out", out, "--model", model, *FLAGS.split(), *flags]
    return list(map(str, words))


def run(dataset, out, model, *flags):
    """Runs the tool. Returns: {video: caption}."""
    caption.main(flags_of(dataset, out, model, *flags))
    with open(out, newline="", encoding="utf8") as file:
        return {row["video"]: row["caption"] for row in csv.DictReader(file)}


def test_csv_of_captions_is_read_as_training_data(llava, videos, tmp_path, drawn):
    run(videos, tmp_path / "a.csv", llava)
    data = all_rows(tmp_path / "a.csv", video_dir=str(videos), frames=2)
    assert data.column("key") == ["a.mp4", "b.mp4", "c.mp4", "inside/d.mp4"]
    texts = [data.captions(k)[0] for k in range(4)]
    assert all(texts)
    assert len(set(texts)) > 1  # the pictures matter
    assert "sentence for the video" not in "".join(texts)  # what was asked is no answer
    report = json.loads((tmp_path / "a.csv.json").read_text())
    assert report["captions"] == 4
    assert report["without"][0]["video"] == "z.mp4"
    # the picture has strips of four frames above their captions
    strip, words = drawn[0]
    frames = common.read_frames(str(videos / "a.mp4"), 4)
    assert np.array_equal(strip, np.concatenate(list(frames), axis=1))
    assert words.split() == texts[0].split()
    assert len(drawn) == 4


def test_captions_of_frames_are_summed_up_by_another_model():
    frames = torch.arange(8, dtype=torch.uint8)[:, None, None, None].expand(8, 3, 4, 4)
    prompts = []

    def caption_model(questions, pictures):
        return [f"frame {np.asarray(picture)[0, 0, 0]}" for picture in pictures]

    def summary_model(questions):
        prompts.extend(questions)
        return ["first", "second"]

    clips = [frames[:4], frames[4:]]
    assert caption.caption_clips(clips, 2, caption_model, summary_model) == ["first", "second"]
    assert "order of time:\nframe 4\nframe 5\nframe 6\nframe 7\n" in prompts[1]


def test_answer_does_not_depend_on_longer_prompts_beside_it(llama):
    """And a prompt begins once, with the first token of the chat template."""
    options = SimpleNamespace(dtype="float32", device="cpu", temperature=0, max_new_tokens=6)
    model = caption.language_model(llama, options)
    prompts = ["a video", caption.PROMPT, "image"]
    alone = [model([prompt])[0] for prompt in prompts]
    ids = []

    def keep_ids(module, inputs):
        if isinstance(module, torch.nn.Embedding):
            ids.append(inputs[0])

    with torch.nn.modules.module.register_module_forward_pre_hook(keep_ids):
        assert model(prompts) == alone
        assert len(set(alone)) > 1
    assert (ids[0] == IDS["bos_token_id"]).sum(1).tolist() == [1, 1, 1]


def test_captions_are_greedy_or_sampled_by_the_seed(llava, videos, tmp_path):
    greedy = run(videos, tmp_path / "1.csv", llava)
    assert run(videos, tmp_path / "2.csv", llava, "--batch", 5, "--seed", 1) == greedy
    sampled = run(videos, tmp_path / "3.csv", llava, "--temperature", 1.5, "--seed", 1)
    other = run(videos, tmp_path / "4.csv", llava, "--temperature", 1.5, "--seed", 2)
    assert len({*map(str, (greedy, sampled, other))}) == 3


def test_two_processes_write_what_one_writes_and_a_stopped_call_goes_on(
        llava, videos, tmp_path, monkeypatch):
    run(videos, tmp_path / "one.csv", llava, "--temperature", 1)
    whole = (tmp_path / "one.csv").read_bytes()
    two = tmp_path / "two.csv"
    words = flags_of(videos, two, llava, "--temperature", 1)
    ended = launch.ranks(tmp_path, lambda rank: caption.main(words))
    assert [code for code, _ in ended] == [0, 0], ended
    assert two.read_bytes() == whole
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
    assert two.read_bytes() == whole
    assert names == ["a.mp4", "b.mp4", "z.mp4"]


def test_caption_overrides_a_failure_of_another_process(tmp_path):
    for rank, texts in enumerate((["words", ""], ["", "words"])):
        with open(tmp_path / f"c.csv.{rank}.jsonl", "w") as file:
            for video, text in enumerate(texts):
                row = {"video": video, "start": None, "end": None, "caption": text}
                file.write(json.dumps(row) + "\n")
    rows = caption.read_rows(str(tmp_path / "c.csv")).values()
    assert [row["caption"] for row in rows] == ["words", "words"]


@pytest.fixture(scope="module")
def begun(llava, videos, tmp_path_factory):
    """A folder with captions.csv of the videos, a folder of one of them, a csv of images, and a
    model without a chat template."""
    root = tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caption, "draw_clips", lambda *_, **__: None)
        run(videos, root / "captions.csv", llava)
    shutil.copytree(videos / "inside", root / "inside")
    write_captions(root, 6, "own.csv")
    shutil.copytree(llava, root / "base")
    (root / "base" / "chat_template.jinja").unlink()
    return root


@pytest.mark.parametrize("flags, words", [
    (["--candidates", "9"], "was made with other settings"),
    (["--dataset", "inside"], "of videos in another folder"),
    (["--frame-encoder", "small", "--out", "b.csv"], "has no published weights"),
    (["--model", "base", "--out", "c.csv"], "has no chat template"),
    (["--dataset", "own.csv", "--out", "d.csv"], "has no video files"),
    (["--out", "own.csv"], "name another file")])
def test_what_cannot_be_is_refused(flags, words, begun, videos, monkeypatch):
    monkeypatch.chdir(begun)
    before = (begun / "own.csv").read_text()
    model = json.loads((begun / "captions.csv.json").read_text())["settings"]["model"]
    with pytest.raises(UserError, match=words):
        run(videos, "captions.csv", model, *flags)
    assert (begun / "own.csv").read_text() == before


# ------------------------------------------------------- paraphrases ------------------------------
@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    import transformers as T

    tokenizer = words_tokenizer()
    config = T.T5Config(
        vocab_size=len(tokenizer), d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2,
        decoder_start_token_id=0)
    torch.manual_seed(5)
    model = T.T5ForConditionalGeneration(config)
    return save_model(model, tokenizer, tmp_path_factory.mktemp("t5"))


@pytest.fixture
def own(tmp_path):
    """A csv of five captions, one of them twice."""
    captions = ["a cat", "a dog sat", "a cat", "the red cow", "on a mat"]
    rows = []
    for name, text in zip(write_images(tmp_path, range(5)), captions):
        rows.append((name, text, "train"))
    return write_rows(tmp_path / "own.csv", ["image", "caption", "split"], rows)


def write_paraphrases(own, model, out):
    """Runs the tool. Returns: the lines of its file."""
    words = ["--dataset", own, "--batch", 2, "--cpu", "--model", model, "--out", out]
    paraphrase.main(list(map(str, words)))
    return out.read_text(encoding="utf8").splitlines(keepends=True)


def test_paraphrases_of_each_caption_once_also_after_a_kill(own, t5, tmp_path):
    path = tmp_path / "p.jsonl"
    first, second, third, fourth = write_paraphrases(own, t5, path)
    for line, text in ((first, "a cat"), (second, "a dog sat"), (third, "the red cow")):
        row = json.loads(line)
        assert row["caption"] == text
        assert len(row["paraphrases"]) == 5
    first = json.dumps(json.loads(first) | {"paraphrases": ["as before"]}) + "\n"
    path.write_text(first + second + third[: len(third) // 2], encoding="utf8")
    assert write_paraphrases(own, t5, path) == [first, second, third, fourth]
    assert Paraphrases(path).get(["a cat"]) == [["as before"]]


def test_paraphrases_of_another_model_and_other_files_are_not_overwritten(own, t5, tmp_path):
    path = tmp_path / "p.jsonl"
    line = "".join(write_paraphrases(own, t5, path)).replace('"by": "', '"by": "other ')
    path.write_text(line, encoding="utf8")
    with pytest.raises(UserError, match="has paraphrases by other .*, not by "):
        write_paraphrases(own, t5, path)
    before = own.read_text()
    with pytest.raises(UserError, match="^--out "):
        write_paraphrases(own, t5, own)
    assert own.read_text() == before
