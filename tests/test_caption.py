"""Key frames, and captions of a vision-language model: real mp4 files, tiny models built from their configs."""

import csv
import json
import math
import sys
import time

import common
from contrastive import figures
from contrastive.engine.processes import UserError

import numpy as np
import pytest
import torch

import launch
import mama
from helpers import TEXT, frame, frame_number, open_splits, write_captions, write_rows, write_video
from tools import caption


def peaks_by_loop(features, k, q):
    """Eqs. 14-15 word by word, in logarithms, since exp underflows; no two frames may be equally dense."""
    n = len(features)
    squared = [[sum((a - b) ** 2 for a, b in zip(x, y)) for y in features] for x in features]
    log_d = [-sum(sorted(squared[j][l] for l in range(n) if l != j)[:k]) / k for j in range(n)]
    gamma = []
    for j in range(n):
        denser = [squared[j][l] for l in range(n) if log_d[l] > log_d[j]]
        gamma.append(min(denser) if denser else max(squared[j]))
    return sorted(sorted(range(n), key=lambda j: -(log_d[j] + math.log(gamma[j])))[:q])


@pytest.mark.parametrize("n, k, q, scale", [(30, 6, 12, 1 / 3), (13, 6, 12, 1 / 3), (9, 2, 1, 1 / 3), (20, 3, 5, 100)])
def test_key_frames_are_the_equations_on_random_features(n, k, q, scale):
    """At scale 100 every exp(-d) is 0 in any float."""
    for seed in range(10):
        x = scale * torch.randn(n, 5, generator=torch.Generator().manual_seed(seed))
        found = mama.key_frames(x, k, q)
        assert found.tolist() == peaks_by_loop(x.double().tolist(), k, q) and found.dtype == torch.long


def test_still_shots_few_frames_equal_frames_and_what_is_refused():
    still, moving = torch.zeros(20, 3), torch.randn(10, 3, generator=torch.Generator().manual_seed(2))
    found = mama.key_frames(torch.cat([still, moving]), q=6).tolist()
    assert found[0] == 0 and len(found) == 6 and all(f >= 20 for f in found[1:])     # a still shot is one key frame
    assert mama.key_frames(torch.zeros(5, 2), q=12).tolist() == [0, 1, 2, 3, 4]
    assert mama.key_frames(torch.zeros(30, 2), q=4).tolist() == [0, 1, 2, 3]         # equal: the first
    assert mama.key_frames([[0.0], [1.0], [5.0]], k=6, q=2).tolist() == [0, 1]       # k is capped, lists will do
    for bad in (torch.zeros(3), torch.full((3, 2), math.nan)):
        with pytest.raises(ValueError, match="finite"):
            mama.key_frames(bad, q=1)

WORDS = ("write a short caption sentence for the video in order from left to right , top bottom user assistant "
         "question answer : image . cat dog bird horse runs jumps sleeps red blue green one two three under and again"
         ).split()

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}

FRAMES = {"a": 5, "b": 12, "c": 24, "d": 30, "e": 18}  # clips and their lengths


def tokenizer():
    """One id a word; ids do not come from the hub."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    names = ["<pad>", "<s>", "</s>", "<unk>", "<image>", *WORDS]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=["<image>"])


def tiny_model(kind, folder):
    """A randomly initialised LLaVA, BLIP-2 or InstructBLIP with its processor, saved as a user has it."""
    import transformers as T
    words, small = tokenizer(), SIZES
    picture = small | {"intermediate_size": 16, "image_size": 32, "patch_size": 16}
    image = words.convert_tokens_to_ids("<image>")
    ids = {"vocab_size": len(words), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    if kind == "llava":
        vision = T.CLIPVisionConfig(**picture | {"num_hidden_layers": 2}, projection_dim=16)
        text = T.LlamaConfig(**small | ids, intermediate_size=16)
        config = T.LlavaConfig(vision_config=vision, text_config=text, image_token_index=image)
        model = T.LlavaForConditionalGeneration(config)
        pixels = T.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
        processor = T.LlavaProcessor(pixels, words, patch_size=16, vision_feature_select_strategy="default",
                                     num_additional_image_tokens=1)
    else:
        name = {"blip-2": "Blip2", "instructblip": "InstructBlip"}[kind]
        vision = getattr(T, f"{name}VisionConfig")(**picture, initializer_range=0.02)  # its default is 1e-10
        qformer = getattr(T, f"{name}QFormerConfig")(**small, vocab_size=len(words), intermediate_size=16,
                                                     encoder_hidden_size=16)
        text = T.OPTConfig(**small | ids, ffn_dim=16, word_embed_proj_dim=16, max_position_embeddings=128)
        config = getattr(T, f"{name}Config")(vision_config=vision, qformer_config=qformer, text_config=text,
                                             num_query_tokens=4, image_token_index=image)
        model = getattr(T, f"{name}ForConditionalGeneration")(config)
        tokenizers = (words,) if kind == "blip-2" else (words, tokenizer())
        pixels = T.BlipImageProcessor(size={"height": 32, "width": 32})
        processor = getattr(T, f"{name}Processor")(pixels, *tokenizers, num_query_tokens=4)
    for p in model.parameters():  # else it says the same of every picture
        p.data *= 10 if p.ndim > 1 else 1
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {kind: tiny_model(kind, root / kind) for kind in ("llava", "blip-2", "instructblip")}


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Five clips, one of them in a folder, and one that is no video; no captions."""
    root = tmp_path_factory.mktemp("videos")
    for k, (name, n) in enumerate(FRAMES.items()):  # the numbers that frame() draws, in other colours in each clip
        shown = [np.roll(frame(i), k, axis=-1) if k < 3 else 255 - frame(40 * k + i) for i in range(n)]
        write_video(root / ("inside" if name == "e" else "") / f"{name}.mp4", shown)
    (root / "z.mp4").write_bytes(TEXT)
    return root

# a 2 x 2 picture, colours as features, 6 words
SMALL = "--grid 2 2 --candidates 8 --frame-encoder colour --max-new-tokens 6 --batch 2 --cpu".split()


def words_of(dataset, out, model, *more):
    """The command line of a small call."""
    return [*map(str, ("--dataset", dataset, "--out", out, "--model", model, *SMALL, *more))]


def run(*words):
    """The tool on (dataset, out, model, *flags).   Returns: {video: caption}."""
    caption.main(words_of(*words))
    with open(words[1], newline="", encoding="utf8") as f:
        return {row["video"]: row["caption"] for row in csv.DictReader(f)}


def test_the_picture_shows_frames_from_left_to_right_and_top_to_bottom_in_a_square():
    frames = torch.stack([torch.full((3, 10, 16), 20 * i) for i in range(12)]).byte()
    picture = np.asarray(caption.grid_picture(frames, 3))  # 3 wide, 4 high: 48 x 40
    assert picture.shape == (48, 48, 3) and (picture[:4] == caption.GREY).all() and (picture[44:] == caption.GREY).all()
    for i in range(12):
        row, column = divmod(i, 3)
        cell = picture[4 + 10 * row:14 + 10 * row, 16 * column:16 * column + 16]
        assert (cell == 20 * i).all()


def test_frames_of_a_short_video_are_repeated_in_order_and_others_are_key_frames(videos):
    features = caption.frame_features("colour", "cpu")
    short = caption.read_candidates(videos / "a.mp4", None, None, 16)  # five different frames
    shown = [frame_number(x.permute(1, 2, 0).numpy()) for x in caption.chosen_frames(short, features, 12)]
    assert shown == sorted(shown) and set(shown) == set(range(5)) and len(shown) == 12
    many = caption.read_candidates(videos / "c.mp4", None, None, 24)
    chosen = caption.chosen_frames(many, features, 4)
    assert torch.equal(chosen, many[mama.key_frames(features(many), q=4)])


def test_frame_features_of_a_clip_model_have_unit_length(tiny):
    """A CLIP takes pictures of its own size alone."""
    x = caption.frame_features(tiny("clip")[0], "cpu")(torch.randint(256, (3, 3, 40, 50), dtype=torch.uint8))
    assert x.shape == (3, 24) and torch.allclose(x.norm(dim=1), torch.ones(3))
    with pytest.raises(UserError, match="--frame-encoder small has no learned weights"):
        caption.frame_features("small", "cpu")


@pytest.mark.parametrize("kind", ["llava", "blip-2", "instructblip"])
def test_a_csv_of_captions_that_the_scripts_read(kind, models, videos, tmp_path, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures.base, "save_figure", lambda fig, path: drawn.append(fig))
    rows = run(videos, tmp_path / "captions.csv", models[kind])
    assert list(rows) == ["a.mp4", "b.mp4", "c.mp4", "d.mp4", "inside/e.mp4"]
    said = {word for text in rows.values() for word in text.split()}
    assert said and said <= {*WORDS, "<unk>"} and len(set(rows.values())) > 1  # the pictures matter
    assert not any("sentence for the video" in text for text in rows.values())  # what was asked is not in the answer
    assert "5 captions; 1 clips have none" in capsys.readouterr().out
    report = json.loads((tmp_path / "captions.csv.json").read_text())
    assert report["captions"] == 5 and [x["video"] for x in report["without"]] == ["z.mp4"]
    axes = [ax for ax in drawn[0].axes if ax.images]                       # Fig. 6: strips of four frames
    assert [ax.get_xlabel().split() for ax in axes] == [text.split() for text in rows.values()]
    strip = np.asarray(axes[0].images[0].get_array())
    frames = common.read_frames(str(videos / "a.mp4"), 4)
    assert np.array_equal(strip, np.concatenate([*frames], axis=1))
    splits = open_splits(tmp_path / "captions.csv", video_dir=str(videos), frames=2, image_size=32)
    read = {d.key(i): d.captions(i) for d in splits.values() for i in range(len(d))}
    assert read == {video: [text] for video, text in rows.items()}
    assert splits["train"].read(0).shape[:2] == (2, 3)


def test_captions_of_frames_are_summed_up_by_another_model(models, videos, tmp_path, monkeypatch):
    import transformers as T
    words, asked, true = tokenizer(), [], caption.language_model
    torch.manual_seed(2)  # others say nothing
    t5 = T.T5ForConditionalGeneration(T.T5Config(
        vocab_size=len(words), d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2, pad_token_id=0, eos_token_id=2,
        decoder_start_token_id=0))
    llama = T.LlamaForCausalLM(T.LlamaConfig(**SIZES, vocab_size=len(words), intermediate_size=16))

    def listening(name, args, sees=False):
        answers = true(name, args, sees)
        return answers if sees else lambda texts: asked.extend(texts) or answers(texts)
    monkeypatch.setattr(caption, "language_model", listening)
    for name, model in (("t5", t5), ("lm", llama)):
        model.save_pretrained(tmp_path / name)
        words.save_pretrained(tmp_path / name)
        rows = run(videos, tmp_path / f"{name}.csv", models["llava"], "--summary-model", tmp_path / name)
        assert rows and not any("Sentences" in text for text in rows.values())
    first = asked[0].split("\n")
    assert first[0] == "Sentences on frames of one video in the order of time:" and len(first) == 6  # four frames
    assert asked[:5] == asked[5:] and len(asked) == 10


def test_greedy_captions_do_not_depend_on_the_batch_and_sampled_ones_on_the_seed(models, videos, tmp_path):
    greedy = run(videos, tmp_path / "1.csv", models["llava"])
    assert greedy == run(videos, tmp_path / "2.csv", models["llava"], "--batch", 5, "--seed", 1)
    hot = ["--temperature", 1.5, "--seed"]
    sampled = [run(videos, tmp_path / f"s{k}.csv", models["llava"], *hot, seed) for k, seed in enumerate((1, 1, 2))]
    assert sampled[0] == sampled[1] != sampled[2] and sampled[0] != greedy


def caption_and_wait(flags, said, hold=0):
    """tools.caption, its words in a file; before clip `hold` it waits to be killed, which may come late."""
    sys.stdout = sys.stderr = open(said, "w", buffering=1, encoding="utf8")
    calls, read = [], caption.read_candidates

    def read_and_wait(*args):
        calls.append(args)
        if len(calls) == hold:
            time.sleep(600)
        return read(*args)
    caption.read_candidates = read_and_wait
    caption.main(flags)


def test_a_killed_call_goes_on_and_writes_the_same(models, videos, tmp_path, monkeypatch):
    own = write_rows(tmp_path / "own.csv", ["video", "start", "end", "caption"],
                     [("d", k / 25, 2, "x") for k in range(20)])
    more = ["--video-dir", videos, "--grid", 1, 1, "--batch", 1, "--temperature", 1, "--seed", 3]
    whole, killed = (words_of(own, tmp_path / f"{name}.csv", models["llava"], *more) for name in ("whole", "killed"))
    child = launch.forked(lambda: caption_and_wait(killed, tmp_path / "said", 10), tmp_path / "log")
    part = tmp_path / "killed.csv.0.jsonl"
    while not (part.exists() and part.read_text().count('"video"') > 2):
        assert child.is_alive(), (tmp_path / "said").read_text()
        time.sleep(0.01)
    child.kill()
    child.join(300)
    lines = [json.loads(line) for line in part.read_text().splitlines() if line]
    assert 2 < len(lines) and not (tmp_path / "killed.csv").exists(), "killed too late"
    part.write_text(part.read_text() + '{"video": "d.mp4", "start": 0.78, "en')  # cut in the middle of a line
    calls, true = [], caption.read_candidates
    monkeypatch.setattr(caption, "draw_clips", lambda *args, **sizes: None)
    monkeypatch.setattr(caption, "read_candidates", lambda *a: calls.append(a[1]) or true(*a))
    caption.main(killed)
    assert len(calls) < 20 and not set(calls) & {row["start"] for row in lines if row["caption"]}
    caption.main(whole)
    assert (tmp_path / "killed.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_a_caption_overrides_a_failure_of_another_process(tmp_path):
    for rank in range(2):
        rows = [{"video": k, "start": None, "end": None, "caption": "said" * (k == rank)} for k in range(2)]
        (tmp_path / f"c.csv.{rank}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [row["caption"] for row in caption.read_known(str(tmp_path / "c.csv")).values()] == ["said"] * 2


def test_two_processes_write_the_file_that_one_writes(models, videos, tmp_path):
    one = run(videos, tmp_path / "one.csv", models["llava"], "--temperature", 1)
    flags = words_of(videos, tmp_path / "two.csv", models["llava"], "--temperature", 1)
    ended = launch.ranks(tmp_path, lambda rank: caption_and_wait(flags, tmp_path / f"said{rank}"))
    said = "".join((tmp_path / f"said{rank}").read_text() for rank in range(2))
    assert [code for code, _ in ended] == [0, 0], said
    assert len([*tmp_path.glob("two.csv.*.jsonl")]) == 2  # each has its own part
    assert (tmp_path / "two.csv").read_bytes() == (tmp_path / "one.csv").read_bytes() and len(one) == 5
    assert said.count("5 captions; 1 clips") == 1


def test_what_cannot_be_is_refused_in_one_line(models, videos, tmp_path):
    with pytest.raises(UserError, match="it has no video files"):
        run(write_captions(tmp_path / "pictures", 40), tmp_path / "x.csv", models["llava"])
    run(videos, tmp_path / "x.csv", models["llava"])
    with pytest.raises(UserError, match="was made with other settings, see x.csv.json; name another file"):
        run(videos, tmp_path / "x.csv", models["llava"], "--candidates", 9)
    (tmp_path / "other.csv").write_text("image,caption\na,b\n")
    with pytest.raises(UserError, match="name another file"):
        run(videos, tmp_path / "other.csv", models["llava"])
    assert (tmp_path / "other.csv").read_text() == "image,caption\na,b\n"
