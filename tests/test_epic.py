"""Multi-instance retrieval: its metrics against plain loops, relevancies, and EPIC-KITCHENS-100."""

import pickle

import common
from contrastive import core, evaluation
from contrastive.data.epic import class_relevancy, multi_hot
from contrastive.evaluation.pieces import EvaluationPieces

import numpy as np
import pytest
import torch

from helpers import CPU, complains, numbers, write_rows, write_video


def loop(sim, rel):
    """{mAP, mAP_binary, nDCG, no_match, unrelated} of the rows as queries, in plain Python."""
    ap, binary, ndcg = [], [], []
    for s, r in zip(np.asarray(sim, float).tolist(), np.asarray(rel, float).tolist()):
        # ties: least relevant first
        ranked = [r[j] for j in sorted(range(len(s)), key=lambda j: (-s[j], r[j]))]
        ones, above = sum(x == 1 for x in ranked), sum(x > 0 for x in ranked)
        if ones:
            at = [k for k, x in enumerate(ranked) if x == 1]
            ap.append(sum(sum(ranked[: k + 1]) / (k + 1) for k in at) / ones)
            binary.append(sum(sum(x == 1 for x in ranked[: k + 1]) / (k + 1) for k in at) / ones)
        if above:
            gain = lambda order: sum(x / np.log2(k + 2) for k, x in enumerate(order[:above]))
            ndcg.append(gain(ranked) / gain(sorted(ranked, reverse=True)))
    return {
        "mAP": 100 * np.mean(ap),
        "mAP_binary": 100 * np.mean(binary),
        "nDCG": 100 * np.mean(ndcg),
        "no_match": len(sim) - len(ap),
        "unrelated": len(sim) - len(ndcg),
    }


def soft_relevancy(rows, columns, seed=0):
    """(rows, columns) of 0, 1/4, 1/2 and 1, with a few queries that have no match, or nothing,
    either way."""
    rng = np.random.default_rng(seed)
    rel = rng.choice([0, 0, 0.25, 0.5, 1], size=(rows, columns), p=[0.3, 0.3, 0.15, 0.15, 0.1])
    rel[3], rel[4, rel[4] == 1], rel[:, 2] = 0, 0.5, 0
    return rel


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [7, 1024])
def test_against_a_plain_loop(kind, chunk):
    rel = soft_relevancy(31, 23)
    # rounded: many ties
    sim = torch.from_numpy(np.random.default_rng(1).normal(size=rel.shape).round(1)).to(kind)
    got = common.mir_metrics(sim, torch.from_numpy(rel).to(kind), chunk=chunk)
    for way, s, r in (("rows", sim, rel), ("columns", sim.T, rel.T)):
        want = loop(s, r)
        assert want["no_match"] > want["unrelated"] > 0
        assert {k: got[way][k] for k in want} == pytest.approx(want, abs=1e-9)
        assert got[way]["queries"] == len(s)
    for k in ("mAP", "nDCG", "mAP_binary"):
        assert got[k] == pytest.approx((got["rows"][k] + got["columns"][k]) / 2)


@pytest.mark.parametrize(
    "bad,words",
    [
        (dict(sim=torch.full((2, 2), float("nan"))), "non-finite"),
        (dict(relevancy=torch.full((2, 2), float("nan"))), "between 0 and 1"),
        (dict(relevancy=torch.full((2, 2), 1.5)), "between 0 and 1"),
        (dict(relevancy=torch.eye(3)), "differ in shape"),
        (dict(relevancy=torch.eye(2) / 2), "none of 2 queries has an item of relevancy 1"),
    ],
)
def test_what_cannot_be_scored_raises(bad, words):
    with pytest.raises(ValueError, match=words):
        common.mir_metrics(**({"sim": torch.eye(2), "relevancy": torch.eye(2)} | bad))


def test_chance_is_what_a_random_order_gets():
    rel = soft_relevancy(12, 9, seed=2)
    chance, rng = core.metrics.mir_chance(rel), np.random.default_rng(0)
    runs = [
        common.mir_metrics(torch.from_numpy(rng.normal(size=rel.shape)), rel) for _ in range(600)
    ]
    for k in ("mAP", "nDCG", "mAP_binary"):
        assert np.mean([r[k] for r in runs]) == pytest.approx(chance[k], abs=0.7), k
        assert np.mean([r["columns"][k] for r in runs]) == pytest.approx(
            chance["columns"][k], abs=1
        ), k


def test_recalls_of_frequent_and_rare_queries():
    ranks = np.array([1, 1, 1, 4, 20, 1, 60, 60, 60])
    frequency = np.array([9, 9, 9, 5, 5, 5, 1, 2, 1])
    recalls = evaluation.by_class.recall_by_frequency
    got = recalls(ranks, frequency)
    assert [got[k]["R@1"] for k in ("head", "mid", "tail")] == pytest.approx([100, 100 / 3, 0])
    assert [(g["queries"], g["from"], g["to"]) for g in got.values()] == [
        (3, 9, 9),
        (3, 5, 5),
        (3, 1, 2),
    ]
    assert recalls(ranks[::-1], frequency[::-1]) == got and recalls(ranks, np.full(9, 4)) == {}
    uneven = recalls(ranks, np.array([9] * 8 + [1]))  # one frequency is never split
    assert {k: v["queries"] for k, v in uneven.items()} == {"mid": 8, "tail": 1}


# ---------------------------------------- relevancies --------------------------------------------
def test_relevancy_of_classes():
    nouns = multi_hot([[1], [1, 2], [0, 1, 2, 3, 4]], 6)
    got = class_relevancy([3, 3, 5], nouns, [3, 5], multi_hot([[1], [0]], 6), torch.float64)
    # (1 + 1)/2, (1 + 1/2)/2, (0 + 1/5)/2, (1 + 1/5)/2
    assert got.tolist() == [[1, 0], [0.75, 0], [0.1, 0.6]]


def test_moving_emoji_is_scored_by_its_own_relevancy():
    """A model that knows the classes is perfect; chance is that of its relevancies; clips and
    captions of one pair have relevancy 1."""
    data = common.load_data("moving-emoji", "val", clips=[300, 40, 40])
    # the captions of one clip come twice, and are one query each
    index = np.array([0, *range(0, 38, 2)])
    texts = [data.captions(i) for i in index]
    # (40, 40), halves of both
    whole = sum((data.column(c)[:, None] == data.column(c)) / 2 for c in ("verb", "noun"))
    eye = torch.eye(int(data.column("group").max()) + 1)
    image = eye[data.column("group")[index]]
    owner = np.repeat(np.arange(20), 3)
    pieces = EvaluationPieces(
        data=data,
        index=index,
        image=image,
        text=image[owner],
        owner=owner,
        texts=[t for c in texts for t in c],
    )
    metrics, chance = evaluation.retrieval.multi_instance_retrieval(pieces, None, None, CPU)
    assert metrics["mAP_binary"] == pytest.approx(100)
    assert metrics["nDCG"] < 100  # it knows no half relevancy
    unique = dict(zip(reversed(pieces.texts), reversed(owner)))
    assert metrics["text_to_image"]["queries"] == len(unique)
    columns = [owner[pieces.texts.index(t)] for t in dict.fromkeys(pieces.texts)]
    want = core.metrics.mir_chance(whole[index][:, index][:, columns])
    assert chance["mAP"] == pytest.approx(want["mAP"])
    assert chance["nDCG"] == pytest.approx(want["nDCG"])


# ---------------------------------------- EPIC-KITCHENS-100 --------------------------------------
HEADER = [
    "narration_id",
    "participant_id",
    "video_id",
    "narration_timestamp",
    "start_timestamp",
    "stop_timestamp",
    "start_frame",
    "stop_frame",
    "narration",
    "verb",
    "verb_class",
    "noun",
    "noun_class",
    "all_nouns",
    "all_noun_classes",
]

# id: (video, start, stop, narration, verb, nouns)
CLIPS = {
    "P01_01_0": ("P01_01", 1, 5, "take plate", 0, [2]),
    "P01_01_1": ("P01_01", 13, 17, "put plate down", 1, [2]),
    "P01_01_2": ("P01_01", 28, 44, "take plate and cup", 0, [2, 13]),
    "P01_01_3": ("P01_01", 40, 44, "stir", 10, [94]),
    "P02_03_0": ("P02_03", 0, 4, "take plate", 0, [2]),
    "P02_03_1": ("P02_03", 2, 6, "move a b c d e", 11, [2, 3, 4, 5, 6]),
    "P09_09_0": ("P09_09", 0, 1, "wash pan", 2, [5]),
}
# no narration twice
SENTENCES = ["P01_01_0", "P01_01_1", "P01_01_2", "P01_01_3", "P02_03_1", "P09_09_0"]


def stamp(t):
    return f"00:{t // 60:02}:{t % 60:05.2f}"


def write_annotations(root, split, clips=CLIPS, sentences=SENTENCES):
    """retrieval_annotations as they are published."""
    rows = [
        [
            i,
            v[:3],
            v,
            stamp(a) + "0",
            stamp(a),
            stamp(b),
            60 * a,
            60 * b,
            text,
            text.split()[0],
            verb,
            "n",
            nouns[0],
            str(["n"] * len(nouns)),
            str(nouns),
        ]
        for i, (v, a, b, text, verb, nouns) in clips.items()
    ]
    table, folder = f"EPIC_100_retrieval_{split}", root / "retrieval_annotations"
    write_rows(folder / f"{table}.csv", HEADER, rows)
    lines = [[i, clips[i][3] if i in clips else "?"] for i in sentences]
    write_rows(folder / f"{table}_sentence.csv", ["narration_id", "narration"], lines)
    return folder


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory):
    """A replica: P01_01 of 45 s at 5 frames a second, P02_03 of 6 s."""
    root = tmp_path_factory.mktemp("epic")
    for split in ("train", "test"):
        write_annotations(root, split)
    write_rows(root / "EPIC_100_verb_classes.csv", ["id", "key"], [[0, "take"], [1, "put"]])
    write_video(root / "videos" / "P02" / "videos" / "P02_03.MP4", range(30), fps=5)
    write_video(root / "videos" / "P01" / "videos" / "P01_01.MP4", range(225), fps=5)
    return root


def kitchens(root, split="test", **options):
    usual = {"video_dir": str(root / "videos"), "frames": 8, "frame_sampling": "random"}
    return common.load_data("epic-kitchens-100", split, data_dir=str(root), **(usual | options))


def test_frames_of_clips_are_the_middles_of_their_parts(kitchen, tmp_path):
    data = kitchens(kitchen)
    assert list(data.keys()) == list(CLIPS)[:6]
    for i, (_, start, end, *_) in enumerate(list(CLIPS.values())[:6]):
        want = [int(5 * (start + (k + 0.5) / 8 * (end - start)) + 1e-6) for k in range(8)]
        assert numbers(data.read(i)) == want, i
    draws = np.linspace(0, 0.99, 8)
    want = [int(5 * (13 + (k + u) / 2) + 1e-6) for k, u in enumerate(draws)]
    assert numbers(data.read(1, draws)) == want
    assert numbers(data.read(1, draws)) != numbers(data.read(1)) == numbers(data.read(1))
    ends = kitchens(kitchen, frames=5, frame_sampling="uniform")
    assert numbers(ends.read(1)) == [65, 70, 74, 79, 84]  # of seconds 13 to 17
    # the video ends after 45 seconds
    late = data.clip(str(kitchen / "videos" / "P01" / "videos" / "P01_01.MP4"), 43, 60)
    assert numbers(late) == [int(5 * (43 + (k + 0.5) / 4) + 1e-6) for k in range(8)]
    cached = kitchens(kitchen, frame_cache=str(tmp_path))
    for i in (1, 2, 1):
        assert numbers(cached.read(i)) == numbers(data.read(i))
    assert len(list(tmp_path.rglob("*.jpg"))) == 2


def test_the_table_of_a_split(kitchen):
    data = kitchens(kitchen)
    assert data.column("verb").tolist() == [0, 1, 0, 10, 0, 11]
    assert data.names("verb")[:3] == ["take", "put", "2"]
    assert data.column("noun").tolist() == [2, 2, 2, 94, 2, 2]
    assert data.column("nouns")[2] == [2, 13]
    assert data.captions(2) == ["take plate and cup"]
    assert data.groups[0] == data.groups[4] != data.groups[1]
    assert data.sentences.texts == [CLIPS[i][3] for i in SENTENCES]
    assert "1 videos (1 rows) are not in" in data.note and "first P09_09" in data.note
    assert "6 sentences, relevancies from the classes" in data.note
    assert "9,668 expected" in data.note


def plain_relevancy(a, b):
    (*_, verb, nouns), (*_, other, others) = CLIPS[a], CLIPS[b]
    return ((verb == other) + len(set(nouns) & set(others)) / len(set(nouns) | set(others))) / 2


def test_relevancies_are_the_published_ones_else_those_of_the_classes(kitchen, tmp_path):
    matrix = np.array([[plain_relevancy(a, b) for b in SENTENCES] for a in CLIPS])
    computed = kitchens(kitchen).sentences.relevancy(np.array([5, 0]))
    assert np.allclose(computed, matrix[[5, 0]]) and computed.dtype == torch.float32
    file = (
        write_annotations(tmp_path, "test")
        / "relevancy"
        / "caption_relevancy_EPIC_100_retrieval_test.pkl"
    )
    file.parent.mkdir()
    file.write_bytes(pickle.dumps(matrix + 0.25))
    data = kitchens(tmp_path, video_dir=str(kitchen / "videos"))
    assert file.name in data.note
    assert np.allclose(data.sentences.relevancy(np.arange(6)), matrix[:6] + 0.25)


def test_training_captions_are_the_relevant_sentences(kitchen):
    """Uniform over the sentences with relevancy > 0.1, strictly; each epoch anew. (In a run:
    test_mmts.py.)"""
    own, data = kitchens(kitchen, "train"), kitchens(kitchen, "train", caption_relevancy=0.1)
    for i, key in enumerate(data.keys()):
        relevant = {CLIPS[s][3] for s in SENTENCES if plain_relevancy(key, s) > 0.1}
        drawn = [data.training_captions(i, 0, epoch, i)[0] for epoch in range(300)]
        assert set(drawn) == relevant
        assert min(drawn.count(t) for t in relevant) > 0.6 * 300 / len(relevant)
        assert (
            own.training_captions(i, 0, 0, i)
            == own.captions(i)
            == data.captions(i)
            == [CLIPS[key][3]]
        )
    # one noun of five, and strictly above counts
    assert plain_relevancy("P02_03_1", "P01_01_0") == 0.1
    assert "take plate" not in {data.training_captions(5, 0, e, 5)[0] for e in range(50)}


def test_sentences_of_missing_clips_are_ranked_and_unreadable_clips_leave_theirs(kitchen):
    data = kitchens(kitchen)
    eye = torch.eye(len(SENTENCES))

    class Model(torch.nn.Module):
        def forward(self, pixels=None, tokens=None):
            return None, eye[tokens["i"]], None

    tokenizer = lambda texts: {"i": torch.tensor([data.sentences.texts.index(t) for t in texts])}
    index = np.array([0, 1, 3, 4, 5])  # clip 2 could not be read
    image = eye[[SENTENCES.index(k) if k in SENTENCES else 0 for k in np.array(list(CLIPS))[index]]]
    pieces = EvaluationPieces(
        data=data,
        index=index,
        image=image,
        text=None,
        owner=None,
        texts=None,
    )
    metrics, chance = evaluation.retrieval.multi_instance_retrieval(pieces, Model(), tokenizer, CPU)
    assert metrics["image_to_text"]["queries"] == 5 and metrics["text_to_image"]["queries"] == 6
    assert metrics["image_to_text"]["mAP_binary"] == 100 and 0 < chance["mAP"] < 100
    assert metrics["text_to_image"]["no_match"] == 2  # of the clips that are not there


# ---------------------------------------- what can be wrong --------------------------------------
MATRIX = pickle.dumps(np.ones((7, 4)))
SPOILT = {
    "Class label 97 greater than": lambda root: write_annotations(
        root, "test", clips=CLIPS | {"P01_01_0": ("P01_01", 0, 1, "x", 97, [1])}
    ),
    "sentence.csv: 'P77_1_0'": lambda root: write_annotations(
        root, "test", sentences=[*SENTENCES, "P77_1_0"]
    ),
    "it holds (7, 4), expected (7, 6)": lambda root: (
        root / "relevancy" / "caption_relevancy_EPIC_100_retrieval_test.pkl"
    ).write_bytes(MATRIX),
}


@pytest.mark.parametrize("words", SPOILT)
def test_annotations_that_are_not_right(words, kitchen, tmp_path):
    write_annotations(tmp_path, "test")
    (tmp_path / "relevancy").mkdir()
    SPOILT[words](tmp_path)
    folders = {"data_dir": str(tmp_path), "video_dir": str(kitchen / "videos")}
    complains("epic-kitchens-100", "test", words, **folders)


def test_what_epic_kitchens_refuses(kitchen):
    where = {
        "data_dir": str(kitchen),
        "video_dir": str(kitchen / "videos"),
        "extra_captions": "more.csv",
    }
    for name, options in (("epic-kitchens-100", where), ("emoji", {})):
        complains(
            name,
            "train",
            "--caption-relevancy: draws sentences of epic",
            caption_relevancy=0.1,
            **options,
        )
