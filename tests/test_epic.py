"""Multi-instance retrieval: its metrics against plain loops, relevancies, and EPIC-KITCHENS-100."""

import math

import common
from contrastive import core, evaluation
from contrastive.core.processes import UserError
from contrastive.data.epic import class_relevancy, multi_hot
from contrastive.evaluation.pieces import EvaluationPieces

import numpy as np
import pytest
import torch

import mmts
from helpers import (
    CPU, complains, numbers, run_script, steps, write_files, write_rows, write_video)


def discounted(gains):
    return sum(gain / math.log2(k + 2) for k, gain in enumerate(gains))


def loop(sim, relevancies):
    """{mAP, mAP_binary, nDCG, no_match, unrelated} of the rows as queries, in plain Python."""
    precisions = []
    binary_precisions = []
    gains = []
    for scores, relevancy in zip(sim.tolist(), relevancies.tolist()):
        # ties: least relevant first
        order = sorted(range(len(scores)), key=lambda j: (-scores[j], relevancy[j]))
        ranked = [relevancy[j] for j in order]
        matches = [k for k, x in enumerate(ranked) if x == 1]
        if matches:
            partial = [sum(ranked[: k + 1]) / (k + 1) for k in matches]
            binary = [ranked[: k + 1].count(1) / (k + 1) for k in matches]
            precisions.append(np.mean(partial))
            binary_precisions.append(np.mean(binary))
        above = np.count_nonzero(ranked)
        if above:
            ideal = sorted(ranked, reverse=True)
            gains.append(discounted(ranked[:above]) / discounted(ideal[:above]))
    return {
        "mAP": 100 * np.mean(precisions),
        "mAP_binary": 100 * np.mean(binary_precisions),
        "nDCG": 100 * np.mean(gains),
        "no_match": len(sim) - len(precisions),
        "unrelated": len(sim) - len(gains),
    }


def soft_relevancy(rows, columns):
    """(rows, columns) of 0, 1/4, 1/2 and 1, with a few queries that have no match, or nothing,
    either way."""
    rng = np.random.default_rng(0)
    relevancy = rng.choice([0, 0.25, 0.5, 1], size=(rows, columns), p=[0.6, 0.15, 0.15, 0.1])
    relevancy[3] = 0
    relevancy[4, relevancy[4] == 1] = 0.5
    relevancy[:, 2] = 0
    return torch.from_numpy(relevancy)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [7, 1024])
def test_mir_metrics_are_a_plain_loop(kind, chunk):
    relevancy = soft_relevancy(31, 23).to(kind)
    # rounded: many ties
    sim = torch.randn(31, 23, generator=torch.Generator().manual_seed(1)).round(decimals=1).to(kind)
    metrics = common.mir_metrics(sim, relevancy, chunk=chunk)
    rows = loop(sim, relevancy)
    columns = loop(sim.T, relevancy.T)
    assert rows["no_match"] > rows["unrelated"] > 0
    for name in rows:
        assert metrics["rows"][name] == pytest.approx(rows[name], abs=1e-9)
        assert metrics["columns"][name] == pytest.approx(columns[name], abs=1e-9)
    for name in ("mAP", "nDCG", "mAP_binary"):
        assert metrics[name] == pytest.approx((rows[name] + columns[name]) / 2)


@pytest.mark.parametrize("sim, relevancy, words", [
    (torch.full((2, 2), torch.nan), torch.eye(2), "non-finite"),
    (torch.eye(2), torch.full((2, 2), torch.nan), "between 0 and 1"),
    (torch.eye(2), torch.full((2, 2), 1.5), "between 0 and 1"),
    (torch.eye(2), torch.eye(3), "differ in shape"),
    (torch.eye(2), torch.eye(2) / 2, "none of 2 queries has an item of relevancy 1")])
def test_what_cannot_be_scored_raises(sim, relevancy, words):
    with pytest.raises(ValueError, match=words):
        common.mir_metrics(sim, relevancy)


def test_chance_is_what_a_random_order_gets():
    relevancy = soft_relevancy(12, 9)
    chance = core.metrics.mir_chance(relevancy.numpy())
    generator = torch.Generator().manual_seed(0)
    for name in ("mAP", "nDCG", "mAP_binary"):
        values = []
        for _ in range(400):
            sim = torch.randn(12, 9, generator=generator)
            values.append(common.mir_metrics(sim, relevancy)[name])
        assert np.mean(values) == pytest.approx(chance[name], abs=0.9)


def test_recalls_of_frequent_and_rare_queries():
    recalls = evaluation.by_class.recall_by_frequency
    parts = recalls(np.array([1, 1, 1, 4, 20, 1, 60, 60, 60]), np.repeat([9, 5, 1], 3))
    assert parts["head"]["R@1"] == 100
    assert parts["head"]["from"] == 9
    assert parts["mid"]["R@1"] == pytest.approx(100 / 3)
    assert parts["mid"]["queries"] == 3
    assert parts["tail"]["R@1"] == 0
    assert parts["tail"]["to"] == 1
    assert recalls(np.ones(9), np.full(9, 4)) == {}
    # one frequency is never split
    parts = recalls(np.ones(9), np.array([9] * 8 + [1]))
    assert {part: recall["queries"] for part, recall in parts.items()} == {"mid": 8, "tail": 1}


# ---------------------------------------- relevancies --------------------------------------------
def test_relevancy_of_classes():
    nouns = multi_hot([[1], [1, 2], [0, 1, 2, 3, 4]], 6)
    others = multi_hot([[1], [0]], 6)
    relevancy = class_relevancy([3, 3, 5], nouns, [3, 5], others, torch.float64)
    # (1 + 1)/2, (1 + 1/2)/2, (0 + 1/5)/2, (1 + 1/5)/2
    assert relevancy.tolist() == [[1, 0], [0.75, 0], [0.1, 0.6]]


def test_moving_emoji_is_scored_by_its_own_relevancy():
    """Of a model that knows the groups but no half relevancy. The captions of one clip come twice,
    and are one query each."""
    data = common.load_data("moving-emoji", "val", clips=[300, 40, 40])
    index = np.array([0, *range(0, 38, 2)])
    owner = np.repeat(np.arange(20), 3)
    texts = []
    for row in index:
        texts += data.captions(row)
    _, groups = np.unique(data.column("group")[index], return_inverse=True)
    image = torch.eye(20)[groups]
    pieces = EvaluationPieces(
        data=data, index=index, image=image, text=image[owner], owner=owner, texts=texts)
    metrics, chance = evaluation.retrieval.multi_instance_retrieval(pieces, None, None, CPU)
    assert metrics["mAP_binary"] == pytest.approx(100)
    assert metrics["nDCG"] < 100
    assert metrics["text_to_image"]["queries"] == len(set(texts)) == 57
    rows = []
    for column in ("verb", "noun"):
        classes = data.column(column)[index]
        rows.append(classes[:, None] == classes)
    relevancy = (rows[0] / 2 + rows[1] / 2)[:, owner[3:]]
    expected = core.metrics.mir_chance(relevancy)
    assert chance["mAP"] == pytest.approx(expected["mAP"])
    assert chance["nDCG"] == pytest.approx(expected["nDCG"])


# ---------------------------------------- EPIC-KITCHENS-100 --------------------------------------
HEADER = [
    "narration_id", "participant_id", "video_id", "narration_timestamp", "start_timestamp",
    "stop_timestamp", "start_frame", "stop_frame", "narration", "verb", "verb_class", "noun",
    "noun_class", "all_nouns", "all_noun_classes"]
# id: (video, start, stop, narration, verb, nouns)
CLIPS = {
    "P01_01_0": ("P01_01", 1, 5, "take plate", 0, [2]),
    "P01_01_1": ("P01_01", 13, 17, "put plate down", 1, [2]),
    "P01_01_2": ("P01_01", 28, 44, "take plate and cup", 0, [2, 13]),
    "P01_01_3": ("P01_01", 40, 44, "stir", 10, [94]),
    "P02_03_0": ("P02_03", 0, 4, "take plate", 0, [2]),
    "P02_03_1": ("P02_03", 2, 6, "move a b c d e", 11, [2, 3, 4, 5, 6]),
    "P09_09_0": ("P09_09", 0, 1, "wash pan", 2, [5])}  # its video is not there
# no narration twice
SENTENCES = ["P01_01_0", "P01_01_1", "P01_01_2", "P01_01_3", "P02_03_1", "P09_09_0"]
TABLE = "retrieval_annotations/EPIC_100_retrieval_{}.csv"
RELEVANCY = "relevancy/caption_relevancy_EPIC_100_retrieval_test.pkl"


def write_annotations(root, split, clips=CLIPS, sentences=SENTENCES):
    """retrieval_annotations as they are published."""
    rows = []
    for key, (video, start, stop, text, verb, nouns) in clips.items():
        times = [f"00:{start // 60:02}:{start % 60:05.2f}", f"00:{stop // 60:02}:{stop % 60:05.2f}"]
        rows.append([
            key, video[:3], video, times[0] + "0", *times, 60 * start, 60 * stop, text,
            text.split()[0], verb, "n", nouns[0], str(["n"] * len(nouns)), str(nouns)])
    write_rows(root / TABLE.format(split), HEADER, rows)
    lines = [[key, "words of JPoSE"] for key in sentences]
    write_rows(root / TABLE.format(f"{split}_sentence"), ["narration_id", "narration"], lines)


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory):
    """A replica: P01_01 of 45 s at 5 frames a second, P02_03 of 6 s."""
    root = tmp_path_factory.mktemp("epic")
    write_annotations(root, "train")
    write_annotations(root, "test")
    write_rows(root / "EPIC_100_verb_classes.csv", ["id", "key"], [[0, "take"], [1, "put"]])
    write_video(root / "videos" / "P02" / "videos" / "P02_03.MP4", range(30), fps=5)
    write_video(root / "videos" / "P01" / "videos" / "P01_01.MP4", range(225), fps=5)
    return root


def load(root, kitchen, split="test", **options):
    usual = {"video_dir": str(kitchen / "videos"), "frames": 8, "frame_sampling": "random"}
    return common.load_data("epic-kitchens-100", split, data_dir=str(root), **(usual | options))


@pytest.mark.parametrize("row", range(6))
def test_frames_of_a_clip_are_the_middles_of_its_parts(row, kitchen):
    data = load(kitchen, kitchen)
    _, start, end, *_ = CLIPS[data.key(row)]
    seconds = start + (np.arange(8) + 0.5) / 8 * (end - start)
    assert numbers(data.read(row)) == np.floor(5 * seconds + 1e-6).tolist()


def test_frames_in_training_lie_where_their_draws_say(kitchen):
    draws = np.linspace(0, 0.99, 8)
    seconds = 13 + (np.arange(8) + draws) / 2
    data = load(kitchen, kitchen, "train")
    assert numbers(data.read(1, draws)) == np.floor(5 * seconds + 1e-6).tolist()


def test_table_of_a_split(kitchen):
    data = load(kitchen, kitchen)
    assert data.column("key") == list(CLIPS)[:6]
    assert data.captions(2) == ["take plate and cup"]
    assert data.column("verb").tolist() == [0, 1, 0, 10, 0, 11]
    assert data.names("verb")[:3] == ["take", "put", "2"]
    assert data.column("noun").tolist() == [2, 2, 2, 94, 2, 2]
    assert data.column("nouns")[2] == [2, 13]
    assert data.groups.tolist() == [0, 1, 2, 3, 0, 4]
    assert data.sentences.texts == [CLIPS[key][3] for key in SENTENCES]
    assert "1 videos (1 rows) are not in" in data.note
    assert "first P09_09" in data.note
    assert "6 sentences, relevancies from the classes" in data.note
    assert "9,668 expected" in data.note


def plain_relevancy(key, other):
    *_, verb, nouns = CLIPS[key]
    *_, other_verb, other_nouns = CLIPS[other]
    shared = len(set(nouns) & set(other_nouns)) / len(set(nouns) | set(other_nouns))
    return ((verb == other_verb) + shared) / 2


def test_relevancies_are_those_of_the_classes(kitchen):
    relevancy = load(kitchen, kitchen).sentences.relevancy(np.arange(6))
    for row in range(6):
        for column, sentence in enumerate(SENTENCES):
            expected = plain_relevancy(list(CLIPS)[row], sentence)
            assert relevancy[row, column] == pytest.approx(expected)


def test_relevancies_of_a_published_file_come_first(kitchen, tmp_path):
    write_annotations(tmp_path, "test")
    matrix = np.arange(42.0).reshape(7, 6)
    write_files(tmp_path, {f"retrieval_annotations/{RELEVANCY}": matrix})
    data = load(tmp_path, kitchen)
    assert "caption_relevancy_EPIC_100_retrieval_test.pkl" in data.note
    assert np.array_equal(data.sentences.relevancy(np.array([5, 0])), matrix[[5, 0]])


def test_training_captions_are_the_relevant_sentences(kitchen):
    """Uniform over the sentences with a relevancy above 0.1, each epoch anew."""
    data = load(kitchen, kitchen, "train", caption_relevancy=0.1)
    # one noun of five, which is not above 0.1
    assert plain_relevancy("P02_03_1", "P01_01_0") == 0.1
    for row, key in enumerate(data.keys()):
        relevant = {CLIPS[other][3] for other in SENTENCES if plain_relevancy(key, other) > 0.1}
        texts = []
        for epoch in range(300):
            texts += data.training_captions(row, 0, epoch, row)
        assert set(texts) == relevant
        for text in relevant:
            assert texts.count(text) > 0.6 * 300 / len(relevant)


class SentenceModel(torch.nn.Module):
    """Its text features are rows of the identity."""

    def forward(self, pixels=None, tokens=None):
        return None, torch.eye(len(SENTENCES))[tokens["i"]], None


def test_sentences_of_missing_clips_are_ranked_and_unreadable_clips_leave_theirs(kitchen):
    data = load(kitchen, kitchen)

    def tokenizer(texts):
        return {"i": torch.tensor([data.sentences.texts.index(text) for text in texts])}

    index = np.array([0, 1, 3, 4, 5])  # clip 2 could not be read
    image = torch.eye(len(SENTENCES))[[0, 1, 3, 0, 4]]
    pieces = EvaluationPieces(
        data=data, index=index, image=image, text=None, owner=None, texts=None)
    metrics, chance = evaluation.retrieval.multi_instance_retrieval(
        pieces, SentenceModel(), tokenizer, CPU)
    assert metrics["image_to_text"]["queries"] == 5
    assert metrics["text_to_image"]["queries"] == 6
    assert metrics["image_to_text"]["mAP_binary"] == 100
    assert 0 < chance["mAP"] < 100
    assert metrics["text_to_image"]["no_match"] == 2  # of the clips that are not there


# ---------------------------------------- what is refused ----------------------------------------
VERB_97 = {"P01_01_0": ("P01_01", 0, 1, "x", 97, [1])}


@pytest.mark.parametrize("clips, sentences, words", [
    (CLIPS | VERB_97, SENTENCES, "Class label 97 greater than"),
    (CLIPS, [*SENTENCES, "P77_1_0"], "sentence.csv: 'P77_1_0'"),
    (CLIPS, SENTENCES[:4], "it holds (7, 6), expected (7, 4)")])
def test_annotations_that_do_not_fit(clips, sentences, words, kitchen, tmp_path):
    write_annotations(tmp_path, "test", clips, sentences)
    write_files(tmp_path, {RELEVANCY: np.ones((7, 6))})
    folders = {"data_dir": str(tmp_path), "video_dir": str(kitchen / "videos")}
    complains("epic-kitchens-100", "test", words, **folders)


def test_caption_relevancy_takes_no_extra_captions(kitchen):
    words = "--caption-relevancy: draws sentences of epic"
    with pytest.raises(UserError, match=words):
        load(kitchen, kitchen, "train", caption_relevancy=0.1, extra_captions="more.csv")


MMTS = (
    "--cpu --workers 0 --dataset epic-kitchens-100 --image-encoder small --text-encoder small "
    "--no-pretrained --image-stats half --mixed-precision no --frames 2 --image-size 16 "
    "--embed-dim 16 --batch-size 6 --max-steps 3 --log-every 1 --eval-every 0 --alpha 0").split()


def test_mmts_has_margins_by_the_noun_of_a_clip(kitchen, tmp_path):
    """Five clips of one noun, one of another."""
    folders = ["--data-dir", kitchen, "--video-dir", kitchen / "videos"]
    summary = run_script(mmts, tmp_path / "run", *MMTS, *folders)
    assert "mir" in summary["test"]["epic-kitchens-100"]
    for row in steps(tmp_path / "run"):
        assert row["margin"] == pytest.approx((5 * 0.3 + 0.17) / 6)
