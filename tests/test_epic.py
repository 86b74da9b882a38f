"""Multi-instance retrieval: its metrics against plain loops, relevancies, and EPIC-KITCHENS-100."""

import itertools

import common
from contrastive.core.metrics import mir_chance
from contrastive.core.processes import UserError
from contrastive.data.epic import seconds_of
from contrastive.evaluation import retrieval
from contrastive.evaluation.pieces import EvaluationPieces

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, ndcg_score

import mmts
from helpers import (
    CPU, complains, numbers, run_script, steps, write_files, write_rows, write_video)

MIR = ("mAP", "nDCG", "mAP_binary")


def mir_by_hand(sim, relevancies):
    """mir_metrics with the rows as queries; scikit-learn's nDCG is linear in the relevancy, too."""
    values = {name: [] for name in MIR}
    for scores, relevancy in zip(sim.numpy(), relevancies.numpy()):
        # ties: least relevant first
        order = np.lexsort([relevancy, -scores])
        ranked = relevancy[order]
        rank = np.arange(1, len(ranked) + 1)
        is_match = ranked == 1
        num_related = np.count_nonzero(ranked)
        if is_match.any():
            precision = ranked.cumsum() / rank
            binary_precision = average_precision_score(is_match, -rank)
            values["mAP"].append(precision[is_match].mean())
            values["mAP_binary"].append(binary_precision)
        if num_related:
            gain = ndcg_score([ranked], [-rank], k=num_related)
            values["nDCG"].append(gain)
    num_queries = len(sim)
    return {
        "mAP": 100 * np.mean(values["mAP"]),
        "mAP_binary": 100 * np.mean(values["mAP_binary"]),
        "nDCG": 100 * np.mean(values["nDCG"]),
        "queries": num_queries,
        "no_match": num_queries - len(values["mAP"]),
        "unrelated": num_queries - len(values["nDCG"]),
    }


def soft_relevancy(rows, columns):
    """(rows, columns) of 0, 1/4, 1/2 and 1, with a few queries that have no match, or nothing,
    either way."""
    draws = np.random.default_rng(0)
    chances = [0.6, 0.15, 0.15, 0.1]
    relevancy = draws.choice([0, 0.25, 0.5, 1], size=(rows, columns), p=chances)
    relevancy[3] = 0
    relevancy[4] = relevancy[4].clip(max=0.5)
    relevancy[:, 2] = 0
    return torch.from_numpy(relevancy)


def test_mir_metrics_by_hand():
    relevancy = soft_relevancy(31, 23).float()
    torch.manual_seed(1)
    sim = torch.randn(31, 23).round(decimals=1)  # many ties
    metrics = common.mir_metrics(sim, relevancy, chunk=7)
    rows = mir_by_hand(sim, relevancy)
    columns = mir_by_hand(sim.T, relevancy.T)
    assert rows["no_match"] > rows["unrelated"] > 0
    assert metrics["rows"] == pytest.approx(rows)
    assert metrics["columns"] == pytest.approx(columns)
    for name in MIR:
        mean = (rows[name] + columns[name]) / 2
        assert metrics[name] == pytest.approx(mean)


EYE = torch.eye(2)


@pytest.mark.parametrize("sim, relevancy, words", [
    (EYE * torch.nan, EYE, "non-finite"),
    (EYE, EYE * torch.nan, "between 0 and 1"),
    (EYE, EYE * 1.5, "between 0 and 1"),
    (EYE, torch.eye(3), "differ in shape"),
    (EYE, EYE / 2, "none of 2 queries has an item of relevancy 1"),
])
def test_what_cannot_be_scored_raises(sim, relevancy, words):
    with pytest.raises(ValueError, match=words):
        common.mir_metrics(sim, relevancy)


def test_chance_is_the_mean_over_all_orders():
    """Queries without a match have no mAP, and without a related item no nDCG."""
    queries = torch.tensor([
        [1, 0.5, 1, 0, 0.25, 0],
        [0.5, 0, 0, 0, 0.25, 0],
        [0, 1, 0, 0.5, 0, 0],
        [0, 0, 0, 0, 0.5, 0],
        [0, 0, 0, 0, 0, 0],
    ])
    orders = torch.tensor([*itertools.permutations(range(6))]).float()
    relevancy = queries.repeat_interleave(720, 0)
    metrics = common.mir_metrics(orders.repeat(len(queries), 1), relevancy)
    chance = mir_chance(queries)["rows"]
    for name in MIR:
        assert chance[name] == pytest.approx(metrics["rows"][name])


# ---------------------------------------- relevancies --------------------------------------------
def test_moving_emoji_is_scored_by_its_own_relevancy():
    """Of a model that knows the groups but no half relevancy. The captions of one clip come twice,
    and are one query each."""
    data = common.load_data("moving-emoji", "val", clips=[300, 40, 40])
    index = np.array([0, *range(0, 38, 2)])
    texts = []
    for row in index:
        texts += data.captions(row)
    owner = np.repeat(np.arange(20), 3)
    groups = data.groups[index]
    image = torch.eye(groups.max() + 1)[groups]
    pieces = EvaluationPieces(data, index, image, image[owner], texts, owner)
    metrics, chance = retrieval.multi_instance_retrieval(pieces, None, None, CPU)
    assert metrics["mAP_binary"] == pytest.approx(100)
    assert chance["nDCG"] < metrics["nDCG"] < 100
    assert metrics["text_to_image"]["queries"] == len(set(texts)) == 57


# ---------------------------------------- EPIC-KITCHENS-100 --------------------------------------
# id: (video, start, stop, narration, verb, nouns)
CLIPS = {
    "P00_09_0": ("P00_09", 0, 1, "wash pan", 2, [5]),  # its video is not there
    "P01_01_0": ("P01_01", 1, 5, "take plate", 0, [2]),
    "P01_01_1": ("P01_01", 13, 17, "put plate down", 1, [2]),
    "P01_01_2": ("P01_01", 28, 44, "take plate and cup", 0, [2, 13]),
    "P01_01_3": ("P01_01", 40, 44, "stir", 10, [94]),
    "P02_03_0": ("P02_03", 0, 4, "take plate", 0, [2]),
    "P02_03_1": ("P02_03", 2, 6, "move a b c d e", 11, [2, 3, 4, 5, 6])}
# no narration twice
SENTENCES = ["P01_01_0", "P01_01_1", "P01_01_2", "P01_01_3", "P02_03_1", "P00_09_0"]
TABLE = "retrieval_annotations/EPIC_100_retrieval_{}.csv"
RELEVANCY = "relevancy/caption_relevancy_EPIC_100_retrieval_test.pkl"


def write_annotations(root, split, clips=CLIPS, sentences=SENTENCES):
    """retrieval_annotations as they are published, of the columns those that are read."""
    rows = []
    for key, (video, start, stop, narration, verb, nouns) in clips.items():
        rows.append({
            "narration_id": key,
            "video_id": video,
            "start_timestamp": f"00:00:{start:05.2f}",
            "stop_timestamp": f"00:00:{stop:05.2f}",
            "narration": narration,
            "verb_class": verb,
            "noun_class": nouns[0],
            "all_noun_classes": str(nouns)})
    lines = [[key, "words of JPoSE"] for key in sentences]
    header = list(rows[0])
    cells = [row.values() for row in rows]
    write_rows(root / TABLE.format(split), header, cells)
    write_rows(root / TABLE.format(f"{split}_sentence"), ["narration_id", "narration"], lines)


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory):
    """A replica: P01_01 of 45 s at 5 frames a second, P02_03 of 6 s."""
    root = tmp_path_factory.mktemp("epic")
    write_annotations(root, "train")
    write_annotations(root, "test")
    write_rows(root / "EPIC_100_verb_classes.csv", ["id", "key"], [[0, "take"], [1, "put"]])
    write_video(root / "videos/P02/videos/P02_03.MP4", range(30), fps=5)
    write_video(root / "videos/P01/videos/P01_01.MP4", range(225), fps=5)
    return root


def load(root, kitchen, split="test", **options):
    usual = {"video_dir": str(kitchen / "videos"), "frames": 8, "frame_sampling": "random"}
    return common.load_data("epic-kitchens-100", split, data_dir=str(root), **(usual | options))


DRAWS = np.linspace(0, 0.99, 8)


@pytest.mark.parametrize("split, draws, places", [("test", None, 0.5), ("train", DRAWS, DRAWS)])
def test_frames_of_a_clip_are_the_middles_of_its_parts_or_drawn_in_training(
        split, draws, places, kitchen):
    data = load(kitchen, kitchen, split)
    seconds = 2 + (np.arange(8) + places) / 2
    expected = np.floor(5 * seconds + 1e-6)
    assert numbers(data.read(5, draws)) == expected.tolist()


def test_table_of_a_split(kitchen):
    data = load(kitchen, kitchen)
    assert data.column("key") == list(CLIPS)[1:]
    assert data.captions(2) == ["take plate and cup"]
    assert data.column("verb").tolist() == [0, 1, 0, 10, 0, 11]
    assert data.names("verb")[:3] == ["take", "put", "2"]
    assert data.column("noun").tolist() == [2, 2, 2, 94, 2, 2]
    assert data.column("nouns")[2] == [2, 13]
    assert data.groups.tolist() == [1, 2, 3, 4, 1, 5]
    assert data.sentences.texts == [CLIPS[key][3] for key in SENTENCES]
    assert "1 videos (1 rows) are not in" in data.note
    assert "6 sentences, relevancies from the classes" in data.note
    assert "9,668 expected" in data.note


def test_timestamps_have_hours_and_minutes():
    assert seconds_of("01:02:03.50") == 3723.5


def plain_relevancy(key, other):
    *_, verb, nouns = CLIPS[key]
    *_, other_verb, other_nouns = CLIPS[other]
    shared = {*nouns} & {*other_nouns}
    union = {*nouns} | {*other_nouns}
    return ((verb == other_verb) + len(shared) / len(union)) / 2


def test_relevancies_are_those_of_the_classes(kitchen):
    data = load(kitchen, kitchen)
    for row, key in enumerate(data.keys()):
        relevancy = data.sentences.relevancy([row])[0].tolist()
        expected = [plain_relevancy(key, sentence) for sentence in SENTENCES]
        assert relevancy == pytest.approx(expected)


def test_relevancies_of_a_published_file_come_first(kitchen, tmp_path):
    write_annotations(tmp_path, "test")
    matrix = np.arange(42.0).reshape(7, 6)
    write_files(tmp_path, {f"retrieval_annotations/{RELEVANCY}": matrix})
    data = load(tmp_path, kitchen)
    assert "caption_relevancy_EPIC_100_retrieval_test.pkl" in data.note
    relevancy = data.sentences.relevancy(np.array([5, 0]))
    assert np.array_equal(relevancy, matrix[[6, 1]])  # that of clip 0 has no row in the data


def test_training_captions_are_the_relevant_sentences(kitchen):
    """Uniform over the sentences with a relevancy above 0.1, each epoch anew."""
    data = load(kitchen, kitchen, "train", caption_relevancy=0.1)
    # one noun of five, which is not above 0.1
    assert plain_relevancy("P02_03_1", "P01_01_0") == 0.1
    for row, key in enumerate(data.keys()):
        sentences = [other for other in SENTENCES if plain_relevancy(key, other) > 0.1]
        relevant = {CLIPS[sentence][3] for sentence in sentences}
        texts = []
        for epoch in range(300):
            texts += data.training_captions(row, 0, epoch, row)
        assert set(texts) == relevant
        for text in relevant:
            assert texts.count(text) > 0.6 * 300 / len(relevant)


def test_sentences_of_missing_clips_are_ranked_and_unreadable_clips_leave_theirs(
        kitchen, monkeypatch):
    """Of a model that knows each sentence."""
    data = load(kitchen, kitchen)
    eye = torch.eye(len(SENTENCES))
    monkeypatch.setattr(retrieval, "encode_texts", lambda *_: eye)
    index = np.array([0, 1, 3, 4, 5])  # clip 2 could not be read
    pieces = EvaluationPieces(data, index, eye[[0, 1, 3, 0, 4]])
    metrics, chance = retrieval.multi_instance_retrieval(pieces, None, None, CPU)
    assert metrics["image_to_text"]["queries"] == 5
    assert metrics["text_to_image"]["queries"] == 6
    assert metrics["image_to_text"]["mAP_binary"] == 100
    assert chance["image_to_text"] == mir_chance(data.sentences.relevancy(index))["rows"]
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
