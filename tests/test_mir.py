"""Multi-instance retrieval: the metrics against plain loops, relevancies, and the sets that have them."""

import json
import pickle

import common
from contrastive import data as data_sets
from contrastive import encoders, evaluation
from contrastive.data.table import EmptySplit
from contrastive.engine.processes import UserError
from contrastive.evaluation.metrics import class_relevancy, multi_hot

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import CLIPConfig

import eval as eval_py
import temo
from helpers import frame_number, write_rows, write_video


def loop(sim, rel):
    """{mAP, mAP_binary, nDCG, no_match, unrelated} of the rows as queries, in plain Python."""
    ap, binary, ndcg = [], [], []
    for s, r in zip(np.asarray(sim, float).tolist(), np.asarray(rel, float).tolist()):
        ranked = [r[j] for j in sorted(range(len(s)), key=lambda j: (-s[j], r[j]))]  # ties: least relevant first
        ones, above = sum(x == 1 for x in ranked), sum(x > 0 for x in ranked)
        if ones:
            at = [k for k, x in enumerate(ranked) if x == 1]
            ap.append(sum(sum(ranked[:k + 1]) / (k + 1) for k in at) / ones)
            binary.append(sum(sum(x == 1 for x in ranked[:k + 1]) / (k + 1) for k in at) / ones)
        if above:
            gain = lambda order: sum(x / np.log2(k + 2) for k, x in enumerate(order[:above]))
            ndcg.append(gain(ranked) / gain(sorted(ranked, reverse=True)))
    return {"mAP": 100 * np.mean(ap), "mAP_binary": 100 * np.mean(binary), "nDCG": 100 * np.mean(ndcg),
            "no_match": len(sim) - len(ap), "unrelated": len(sim) - len(ndcg)}


def soft_relevancy(rows, columns, seed=0):
    """(rows, columns) of 0, 1/4, 1/2 and 1, with a few queries that have no match, or nothing, either way."""
    rng = np.random.default_rng(seed)
    rel = rng.choice([0, 0, 0.25, 0.5, 1], size=(rows, columns), p=[0.3, 0.3, 0.15, 0.15, 0.1])
    rel[3], rel[4, rel[4] == 1], rel[:, 2] = 0, 0.5, 0
    return rel


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [1, 7, 1024])
def test_against_a_plain_loop(kind, chunk):
    rel = soft_relevancy(31, 23)
    sim = torch.from_numpy(np.random.default_rng(1).normal(size=rel.shape).round(1)).to(kind)  # rounded: many ties
    got = common.mir_metrics(sim, torch.from_numpy(rel).to(kind), chunk=chunk)
    for way, s, r in (("rows", sim, rel), ("columns", sim.T, rel.T)):
        want = loop(s, r)
        assert want["no_match"] > want["unrelated"] > 0
        assert {k: got[way][k] for k in want} == pytest.approx(want, abs=1e-9)
        assert got[way]["queries"] == len(s)
    for k in ("mAP", "nDCG", "mAP_binary"):
        assert got[k] == pytest.approx((got["rows"][k] + got["columns"][k]) / 2)


@pytest.mark.parametrize("sim, relevancy, wanted", [
    ([[0.1, 0.9]], [[1, 0.5]], {"mAP": 75, "mAP_binary": 50}),  # the soft precision of EPIC's code
    ([[0.1, 0.9]], [[1, 0.0]], {"mAP": 50, "mAP_binary": 50}),
    (np.eye(3), [[1, 0, 0], [0, 0.5, 0], [0, 0, 0]], {"mAP": 100, "nDCG": 100, "no_match": 2, "unrelated": 1}),
    (np.zeros((50, 50)), np.eye(50), {"mAP": 2, "nDCG": 0})])  # a collapsed model: the one item stands last
def test_metrics_by_hand(sim, relevancy, wanted):
    got = common.mir_metrics(torch.tensor(sim), np.array(relevancy))["rows"]
    assert {k: got[k] for k in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize("bad,words", [
    (dict(sim=torch.full((2, 2), float("nan"))), "non-finite"),
    (dict(relevancy=torch.full((2, 2), float("nan"))), "between 0 and 1"),
    (dict(relevancy=torch.full((2, 2), 1.5)), "between 0 and 1"),
    (dict(relevancy=torch.eye(3)), "differ in shape"),
    (dict(relevancy=torch.eye(2) / 2), "none of 2 queries has an item of relevancy 1")])
def test_what_cannot_be_scored_raises(bad, words):
    with pytest.raises(ValueError, match=words):
        common.mir_metrics(**({"sim": torch.eye(2), "relevancy": torch.eye(2)} | bad))


def test_chance_is_what_a_random_order_gets():
    rel = soft_relevancy(12, 9, seed=2)
    chance, rng = evaluation.metrics.mir_chance(rel), np.random.default_rng(0)
    runs = [common.mir_metrics(torch.from_numpy(rng.normal(size=rel.shape)), rel) for _ in range(600)]
    for k in ("mAP", "nDCG", "mAP_binary"):
        assert np.mean([r[k] for r in runs]) == pytest.approx(chance[k], abs=0.7), k
        assert np.mean([r["columns"][k] for r in runs]) == pytest.approx(chance["columns"][k], abs=1), k


def test_recalls_of_frequent_and_rare_queries():
    ranks, frequency = np.array([1, 1, 1, 4, 20, 1, 60, 60, 60]), np.array([9, 9, 9, 5, 5, 5, 1, 2, 1])
    recalls = evaluation.by_class.recall_by_frequency
    got = recalls(ranks, frequency)
    assert [got[k]["R@1"] for k in ("head", "mid", "tail")] == pytest.approx([100, 100 / 3, 0])
    assert got["mid"]["R@5"] == pytest.approx(200 / 3) and got["tail"]["MdR"] == 60
    assert [(g["queries"], g["from"], g["to"]) for g in got.values()] == [(3, 9, 9), (3, 5, 5), (3, 1, 2)]
    assert recalls(ranks[::-1], frequency[::-1]) == got and recalls(ranks, np.full(9, 4)) == {}
    uneven = recalls(ranks, np.array([9] * 8 + [1]))  # one frequency is never split
    assert {k: v["queries"] for k, v in uneven.items()} == {"mid": 8, "tail": 1}


# ---- relevancies ----
def test_relevancy_of_classes():
    nouns = multi_hot([[1], [1, 2], [0, 1, 2, 3, 4]], 6)
    got = class_relevancy([3, 3, 5], nouns, [3, 5], multi_hot([[1], [0]], 6), torch.float64)
    assert got.tolist() == [[1, 0], [0.75, 0], [0.1, 0.6]]  # (1 + 1)/2, (1 + 1/2)/2, (0 + 1/5)/2, (1 + 1/5)/2


def test_moving_emoji_is_scored_by_its_own_relevancy():
    """A model that knows the classes is perfect, one that knows nothing is at chance; clips and captions of one pair
    have relevancy 1."""
    data = common.load_data("moving-emoji", "val", clips=[300, 40, 40])
    index = np.array([0, *range(0, 38, 2)])  # the captions of one clip come twice, and are one query each
    texts = [data.captions(i) for i in index]
    whole = sum((data.column(c)[:, None] == data.column(c)) / 2 for c in ("verb", "noun"))  # (40, 40), halves of both
    eye = torch.eye(int(data.column("group").max()) + 1)
    image = eye[data.column("group")[index]]
    owner = np.repeat(np.arange(20), 3)
    pieces = {"data": data, "index": index, "image": image, "text": image[owner], "owner": owner,
              "texts": [t for c in texts for t in c]}
    metrics, chance = evaluation.retrieval.mir_of(None, None, pieces, torch.device("cpu"))
    assert metrics["mAP_binary"] == pytest.approx(100) and metrics["nDCG"] < 100  # it knows no half relevancy
    unique = {t: i for t, i in zip(reversed(pieces["texts"]), reversed(owner))}
    assert metrics["text_to_image"]["queries"] == len(unique)
    columns = [owner[pieces["texts"].index(t)] for t in dict.fromkeys(pieces["texts"])]
    want = evaluation.metrics.mir_chance(whole[index][:, index][:, columns])
    assert chance["mAP"] == pytest.approx(want["mAP"]) and chance["nDCG"] == pytest.approx(want["nDCG"])


# ---- EPIC-KITCHENS-100 ----
HEADER = ["narration_id", "participant_id", "video_id", "narration_timestamp", "start_timestamp", "stop_timestamp",
          "start_frame", "stop_frame", "narration", "verb", "verb_class", "noun", "noun_class", "all_nouns",
          "all_noun_classes"]
# id: (video, start, stop, narration, verb, nouns)
CLIPS = {"P01_01_0": ("P01_01", 1, 5, "take plate", 0, [2]), "P01_01_1": ("P01_01", 13, 17, "put plate down", 1, [2]),
         "P01_01_2": ("P01_01", 28, 44, "take plate and cup", 0, [2, 13]),
         "P01_01_3": ("P01_01", 40, 44, "stir", 10, [94]),
         "P02_03_0": ("P02_03", 0, 4, "take plate", 0, [2]),
         "P02_03_1": ("P02_03", 2, 6, "move a b c d e", 11, [2, 3, 4, 5, 6]),
         "P09_09_0": ("P09_09", 0, 1, "wash pan", 2, [5])}
SENTENCES = ["P01_01_0", "P01_01_1", "P01_01_2", "P01_01_3", "P02_03_1", "P09_09_0"]  # no narration twice


def stamp(t):
    return f"00:{t // 60:02}:{t % 60:05.2f}"


def write_annotations(root, split, uid=False, clips=CLIPS, sentences=SENTENCES):
    """retrieval_annotations as they are published; uid: an older copy."""
    rows = [[i, v[:3], v, stamp(a) + "0", stamp(a), stamp(b), 60 * a, 60 * b, text, text.split()[0], verb, "n",
             nouns[0], str(["n"] * len(nouns)), str(nouns)] for i, (v, a, b, text, verb, nouns) in clips.items()]
    folder, head, more = root / "retrieval_annotations", HEADER, ["narration_id", "narration"]
    if uid:
        head, rows = ["uid", *HEADER], [[k, *r] for k, r in enumerate(rows)]
        more = ["index", "narration", "verb_class", "noun_classes", "verb", "nouns"]
    write_rows(folder / f"EPIC_100_retrieval_{split}.csv", head, rows)
    lines = [[i, clips[i][3], clips[i][4], clips[i][5], "v", "n"][:len(more)] for i in sentences]
    return write_rows(folder / f"EPIC_100_retrieval_{split}_sentence.csv", more, lines).parent


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory):
    """A replica: P01_01 of 45 s at 5 frames a second, whole and in chunks of 15 s, P02_03 of 6 s."""
    root = tmp_path_factory.mktemp("epic")
    for split in ("train", "test"):
        write_annotations(root, split)
    write_rows(root / "EPIC_100_verb_classes.csv", ["id", "key"], [[0, "take"], [1, "put"]])
    for kind in ("whole", "chunks"):
        write_video(root / kind / "P02" / "videos" / "P02_03.MP4", range(30), fps=5)
    write_video(root / "whole" / "P01" / "videos" / "P01_01.MP4", range(225), fps=5)
    for k in range(3):
        write_video(root / "chunks" / "P01" / "P01_01.MP4" / f"{15 * k}.MP4", range(75 * k, 75 * k + 75), fps=5)
    return root


def kitchens(root, split="test", videos="chunks", **options):
    usual = {"video_dir": str(root / videos), "frames": 8, "frame_sampling": "random"}
    return common.load_data("epic-kitchens-100", split, data_dir=str(root), **(usual | options))


def shown(clip):
    return [frame_number(x) for x in clip.permute(0, 2, 3, 1).numpy()]


def test_clips_of_whole_videos_and_of_chunks_are_the_middles_of_their_parts(kitchen, tmp_path):
    whole, chunks = (kitchens(kitchen, videos=v) for v in ("whole", "chunks"))
    assert list(whole.keys()) == list(chunks.keys()) == list(CLIPS)[:6]
    for i, (_, start, end, *_) in enumerate(list(CLIPS.values())[:6]):
        want = [int(5 * (start + (k + 0.5) / 8 * (end - start)) + 1e-6) for k in range(8)]
        assert shown(chunks.read(i)) == shown(whole.read(i)) == want, i
    draws = np.linspace(0, 0.99, 8)
    assert shown(chunks.read(1, draws)) == [int(5 * (13 + (k + u) / 2) + 1e-6) for k, u in enumerate(draws)]
    assert shown(chunks.read(1, draws)) != shown(chunks.read(1)) == shown(chunks.read(1))
    assert shown(kitchens(kitchen, frames=16).read(2))[-1] > 215  # the last of three chunks
    ends = kitchens(kitchen, frames=5, frame_sampling="uniform")
    assert shown(ends.read(1)) == [65, 70, 75, 80, 85]  # of seconds 13 to 17
    late = chunks.clip(str(kitchen / "chunks" / "P01" / "P01_01.MP4"), 43, 60)  # the video ends after 45 seconds
    assert shown(late) == [int(5 * (43 + (k + 0.5) / 4) + 1e-6) for k in range(8)]
    cached = kitchens(kitchen, frame_cache=str(tmp_path))
    assert [shown(cached.read(i)) for i in (1, 2, 1)] == [shown(chunks.read(i)) for i in (1, 2, 1)]
    assert len(list(tmp_path.rglob("*.jpg"))) == 2


@pytest.mark.parametrize("uid", [False, True])  # of an older copy
def test_the_table_of_a_split(uid, kitchen, tmp_path):
    write_annotations(tmp_path, "test", uid)
    write_rows(tmp_path / "EPIC_100_verb_classes.csv", ["id", "key"], [[0, "take"], [1, "put"]])
    data = kitchens(tmp_path, video_dir=str(kitchen / "chunks"))
    assert data.column("verb").tolist() == [0, 1, 0, 10, 0, 11] and data.names("verb")[:3] == ["take", "put", "2"]
    assert data.column("noun").tolist() == [2, 2, 2, 94, 2, 2] and data.column("nouns")[2] == [2, 13]
    assert data.captions(2) == ["take plate and cup"] and data.groups[0] == data.groups[4] != data.groups[1]
    assert data.sentences.texts == [CLIPS[i][3] for i in SENTENCES]
    assert "1 videos (1 rows) are not in" in data.note and "first P09_09" in data.note
    assert "6 sentences, relevancies from the classes" in data.note and "9,668 expected" in data.note


def plain_relevancy(a, b):
    (*_, verb, nouns), (*_, other, others) = CLIPS[a], CLIPS[b]
    return ((verb == other) + len(set(nouns) & set(others)) / len(set(nouns) | set(others))) / 2


def test_relevancies_are_the_published_ones_else_those_of_the_classes(kitchen, tmp_path):
    matrix = np.array([[plain_relevancy(a, b) for b in SENTENCES] for a in CLIPS])
    computed = kitchens(kitchen).sentences.relevancy(np.array([5, 0]))
    assert np.allclose(computed, matrix[[5, 0]]) and computed.dtype == torch.float32
    file = write_annotations(tmp_path, "test") / "relevancy" / "caption_relevancy_EPIC_100_retrieval_test.pkl"
    file.parent.mkdir()
    file.write_bytes(pickle.dumps(matrix + 0.25))
    data = kitchens(tmp_path, video_dir=str(kitchen / "chunks"))
    assert file.name in data.note and np.allclose(data.sentences.relevancy(np.arange(6)), matrix[:6] + 0.25)


def test_training_captions_are_the_relevant_sentences(kitchen):
    """Uniform over the sentences with relevancy > 0.1, strictly; the same on any number of workers; each epoch anew."""
    own, data = kitchens(kitchen, "train"), kitchens(kitchen, "train", caption_relevancy=0.1)
    for i, key in enumerate(data.keys()):
        relevant = {CLIPS[s][3] for s in SENTENCES if plain_relevancy(key, s) > 0.1}
        drawn = [data.training_captions(i, 0, epoch, i)[0] for epoch in range(300)]
        assert set(drawn) == relevant
        assert min(drawn.count(t) for t in relevant) > 0.6 * 300 / len(relevant)
        assert own.training_captions(i, 0, 0, i) == own.captions(i) == data.captions(i) == [CLIPS[key][3]]
    assert plain_relevancy("P02_03_1", "P01_01_0") == 0.1  # one noun of five, and strictly above counts
    assert "take plate" not in {data.training_captions(5, 0, e, 5)[0] for e in range(50)}
    runs = []
    for workers in (0, 2):
        batches = common.Batches(data, [common.Augment(16)], common.EvalTransform(16, [0] * 3, [1] * 3), 3, 0, 0, 4,
                                 torch.device("cpu"), workers)
        runs.append([(b["keys"], b["captions"]) for b in batches])
    assert runs[0] == runs[1] and any(c != [CLIPS[k][3]] for keys, cs in runs[0] for k, c in zip(keys, cs))


def test_sentences_of_missing_clips_are_ranked_and_unreadable_clips_leave_theirs(kitchen):
    data = kitchens(kitchen)
    eye = torch.eye(len(SENTENCES))

    class Model(torch.nn.Module):
        def forward(self, pixels=None, tokens=None):
            return None, eye[tokens["i"]], None
    tokenizer = lambda texts: {"i": torch.tensor([data.sentences.texts.index(t) for t in texts])}
    index = np.array([0, 1, 3, 4, 5])  # clip 2 could not be read
    image = eye[[SENTENCES.index(k) if k in SENTENCES else 0 for k in np.array(list(CLIPS))[index]]]
    pieces = {"data": data, "index": index, "image": image, "text": None, "owner": None, "texts": None}
    metrics, chance = evaluation.retrieval.mir_of(Model(), tokenizer, pieces, torch.device("cpu"))
    assert metrics["image_to_text"]["queries"] == 5 and metrics["text_to_image"]["queries"] == 6
    assert metrics["image_to_text"]["mAP_binary"] == 100 and 0 < chance["mAP"] < 100
    assert metrics["text_to_image"]["no_match"] == 2  # of the clips that are not there


def epic_files(file, rows=()):
    """Changes a table of the replica, or with no rows removes it."""
    def change(root):
        path = root / "retrieval_annotations" / f"EPIC_100_retrieval_test{file}"
        write_rows(path, ["a", "b"], rows) if rows else path.unlink()
    return change


def epic_matrix(root):
    (root / "relevancy").mkdir()
    (root / "relevancy" / "caption_relevancy_EPIC_100_retrieval_test.pkl").write_bytes(pickle.dumps(np.ones((7, 4))))


def epic_clip(*clip):
    return lambda root: write_annotations(root, "test", clips=CLIPS | {"P01_01_0": clip})


@pytest.mark.parametrize("change,words", [
    (epic_files(".csv"), "none of EPIC_100_retrieval_test.csv is there"),
    (epic_files("_sentence.csv"), "none of EPIC_100_retrieval_test_sentence.csv is there"),
    (epic_clip("P01_01", 0, 1, "x", 97, [1]), "Class label 97 greater than"),
    (epic_files("_sentence.csv", [["P77_1_0", "x"]]), "'P77_1_0'"),
    (epic_files(".csv", [["1", "2"]]), "test.csv: 'narration'"),
    (epic_matrix, r"it holds \(7, 4\), expected \(7, 6\)")])
def test_annotations_that_are_not_right(change, words, kitchen, tmp_path):
    write_annotations(tmp_path, "test")
    change(tmp_path)
    with pytest.raises(UserError, match=words):
        kitchens(tmp_path, video_dir=str(kitchen / "whole"))


def test_what_epic_kitchens_refuses(kitchen, tmp_path):
    (tmp_path / "features").mkdir()
    np.save(tmp_path / "features" / "P01_01.npy", np.zeros((5, 2)))
    flags = ["--dataset", "emoji", "--eval-datasets", "emoji", f"epic-kitchens-100={kitchen}", "--cpu"]
    for words, ask in [
            ("needs --data-dir", lambda: common.load_data("epic-kitchens-100", "train")),
            ("has no val split; it has: train, test", lambda: kitchens(kitchen, "val")),
            ("none of 3 videos is below .*for P01_01", lambda: kitchens(kitchen, videos="retrieval_annotations")),
            ("several windows", lambda: kitchens(kitchen, feature_dir=(str(tmp_path / "features"),))),
            ("--caption-relevancy: draws sentences", lambda: kitchens(
                kitchen, "train", caption_relevancy=0.1, extra_captions=str(kitchen / "EPIC_100_verb_classes.csv"))),
            ("--caption-relevancy: draws sentences", lambda: data_sets.open_data(  # known, since a set has it
                temo.parse_args([*flags, "--caption-relevancy", "0.1"])))]:
        with pytest.raises(UserError, match=words):
            ask()
    chunks = tmp_path / "cut" / "P01" / "P01_01.MP4"
    chunks.mkdir(parents=True)
    for k, there in ((0, 0), (30, 30), (45, 30)):  # 15.MP4 is not there
        (chunks / f"{k}.MP4").symlink_to(kitchen / "chunks" / "P01" / "P01_01.MP4" / f"{there}.MP4")
    with pytest.raises(ValueError, match="no chunk of .*P01_01.MP4 has second 16"):
        kitchens(kitchen, video_dir=str(tmp_path / "cut")).read(1)


# ---- Something-Something v2, long tail ----
def write_ssv2(root, split, ids, listed):
    word = {"train": "train", "val": "validation"}[split]
    rows = [{"id": str(i), "label": f"holding thing {i}", "placeholders": [f"thing {i}"],
             "template": "Holding [something]" if i % 3 else "Moving [something] up"} for i in ids]
    root.mkdir(exist_ok=True)
    (root / f"something-something-v2-{word}.json").write_text(json.dumps(rows))
    lines = [f'{i} {k} {f} {i}/{i}_{f:06}.jpg ""' for k, i in enumerate(listed) for f in range(3)]
    (root / f"{split}.csv").write_text("\n".join(["original_vido_id video_id frame_id path labels", *lines]) + "\n")


def test_ssv2_lt(tmp_path):
    write_ssv2(tmp_path / "labels", "train", range(100, 106), [105, 101, 102, 999])
    write_ssv2(tmp_path / "labels", "val", [200, 201, 202], [201])
    for i in (101, 105, 201):
        write_video(tmp_path / "20bn-something-something-v2" / f"{i}.webm", range(i, i + 6), "libvpx-vp9", 12)
    read = lambda split: common.load_data("ssv2-lt", split, data_dir=str(tmp_path / "labels"), frames=3,
                                          video_dir=str(tmp_path / "20bn-something-something-v2"))
    with pytest.raises(EmptySplit, match="no annotation file of its val split"):
        read("val")
    (tmp_path / "labels" / "trainval.csv").write_text("original_vido_id\n105 0 0 a.jpg\n201 0 0 a.jpg\n")
    for split, keys, expected in (("train", ["101", "105"], "50,418"), ("test", ["201"], "2,610"),
                                  ("val", ["105", "201"], "6,960")):  # whichever of the two files of labels has them
        data = read(split)
        assert list(data.keys()) == keys and f"{expected} expected" in data.note and data.clip.at_rest == "middle"
    assert shown(read("test").read(0)) == [201, 203, 206] and read("train").captions(1) == ["holding thing 105"]
    assert read("train").label_names == ["Holding something", "Moving something up"]
    assert read("train").labels.tolist() == [0, 1] and "1 videos (1 rows) are not in" in read("train").note


# ---- a run and eval.py ----
def test_a_run_and_eval_report_the_same_numbers(kitchen, tmp_path, capsys, monkeypatch):
    """Any script, any checkpoint: MIR of EPIC-KITCHENS from its sentences."""
    monkeypatch.setattr(temo, "draw", lambda run: None)
    flags = ["--dataset", "epic-kitchens-100", "--data-dir", kitchen, "--video-dir", kitchen / "chunks", "--cpu",
             "--frames", 2, "--frame-sampling", "random", "--image-size", 16, "--text-length", 8, "--batch-size", 3,
             "--max-steps", 2, "--workers", 0, "--output-dir", tmp_path, "--run-name", "r"]
    summary = temo.main(temo.parse_args([str(f) for f in flags]))
    out = capsys.readouterr().out
    assert "6 clips, 6 captions" in out and "text -> video" in out and "video -> text" in out and "R-Mean" in out
    assert "mir/text -> video" in out and "-> image" not in out and "no_match 1" in out
    own, chance = (summary[k]["epic-kitchens-100"] for k in ("test", "chance"))
    assert own["mir"]["text_to_image"]["queries"] == 6 and own["mir"].keys() == chance["mir"].keys()

    result = eval_py.main(eval_py.parse_args(["--checkpoint", str(tmp_path / "r"), "--cpu",
                                              "--workers", "0", "--tasks", "mir", "retrieval"]))
    got = result["datasets"]["epic-kitchens-100"]
    assert got["metrics"]["mir"] == own["mir"] and got["chance"]["mir"] == chance["mir"]
    others = ["--datasets", "emoji", "--tasks", "mir", "gap", "--workers", "0"]
    result = eval_py.main(eval_py.parse_args(["--checkpoint", str(tmp_path / "r"), "--cpu", *others]))["datasets"]
    assert result["emoji"]["left_out"] == {"mir": "the set has no relevancies (no verb and noun classes)"}


# ---- the video tower, and AVION's weights ----
WIDTH, PATCHES, LAYERS = 16, 4, 2  # of a tiny ViT: AVION's has 768, 196 and 12


@pytest.fixture
def tiny_vit(monkeypatch):
    """timm's CLIP ViT in small, under its own name."""
    def create(name, img_size=0, **options):
        small = dict(embed_dim=WIDTH, depth=LAYERS, num_heads=2, img_size=img_size) if img_size else {}
        return make(name, **options, **small)
    make = timm.create_model
    monkeypatch.setattr(timm, "create_model", create)


VIT = "video_vit_base_patch16_clip_224"


def test_the_video_tower_is_one_transformer_over_all_patches(tiny_vit):
    torch.manual_seed(0)
    encoder = common.VisionEncoder(VIT, 8, False, 32, frames=3).eval()
    body, clip = encoder.body, torch.randn(2, 3, 3, 32, 32)
    for p in body.parameters():
        torch.nn.init.normal_(p, std=0.3)
    torch.nn.init.normal_(body.temporal, std=9)
    features, embedding = encoder(clip)
    assert features.shape == (2, WIDTH) and embedding.shape == (2, 8)
    tokens = [body.vit.cls_token[0, 0] + body.vit.pos_embed[0, 0]]  # the plain way, of the second clip
    for t in range(3):
        patches = body.vit.patch_embed(clip[1:, t])[0]
        tokens += [patches[p] + body.vit.pos_embed[0, 1 + p] + body.temporal[t] for p in range(PATCHES)]
    x = body.vit.norm_pre(torch.stack(tokens)[None])
    for block in body.vit.blocks:
        x = block(x)
    assert torch.allclose(features[1], body.vit.norm(x)[0, 0], atol=1e-5)
    assert not torch.allclose(encoder(clip.flip(1))[0], features, atol=1e-3)  # the order of the frames matters
    still = common.VisionEncoder(VIT, 8, False, 32, frames=3).eval()  # as it starts, it does not
    assert torch.allclose(still(clip.flip(1))[0], still(clip)[0], atol=1e-5)
    assert {m.eps for m in body.modules() if isinstance(m, torch.nn.LayerNorm)} == {1e-6}
    for wrong in (clip[:, :2], clip[:, 0]):
        with pytest.raises(UserError, match="made for clips of 3 frames"):
            encoder(wrong)
    with pytest.raises(UserError, match="video_resnet18: .*no attribute"):
        common.VisionEncoder("video_resnet18", 8, False, 32, frames=3)


def test_a_run_with_the_video_tower(tiny_vit, tmp_path, monkeypatch):
    monkeypatch.setattr(temo, "draw", lambda run: None)
    flags = ["--image-encoder", VIT, "--image-size", "32", "--image-stats", "encoder", "--no-pretrained", "--cpu",
             "--batch-size", "8", "--chunk-size", "4", "--max-steps", "2", "--output-dir", str(tmp_path)]
    clips = ["--dataset", "moving-emoji", "--clips", "16", "8", "8", "--run-name", "r"]
    summary = temo.main(temo.parse_args([*clips, *flags]))
    assert summary["steps"] == 2 and 0 < summary["test"]["moving-emoji"]["mir"]["mAP"] < 100
    model, _, transform = common.load_model(tmp_path / "r")
    assert model.vision.body.temporal.shape == (4, WIDTH) and model.vision.body.temporal.abs().max() > 0
    assert transform.mean == pytest.approx(list(encoders.base.STATS["clip"][0]))
    with pytest.raises(UserError, match="made for clips of 0 frames"):
        temo.main(temo.parse_args(flags))


def avion_state(flash, frames=4, layers=LAYERS, widths=(WIDTH, WIDTH), patches=PATCHES, words=40, length=12, out=8):
    """A state dict by the names and shapes of AVION's CLIP_VITB16, as its fast (flash) or plain code saves it; widths:
    of the video and the text tower."""
    video_width, text_width = widths
    torch.manual_seed(1)
    shapes = {"logit_scale": (), "visual.class_embedding": (video_width,),
              "visual.temporal_embedding": (frames, video_width),
              "visual.positional_embedding": (patches + 1, video_width), "visual.image_projection": (video_width, out),
              "visual.conv1.weight": (video_width, 3 * 16 * 16) if flash else (video_width, 3, 16, 16),
              "textual.positional_embedding": (length, text_width), "textual.text_projection": (text_width, out),
              "textual.token_embedding.weight": (words, text_width)}
    fast = {"attn.in_proj_weight": "attn.Wqkv.weight", "attn.in_proj_bias": "attn.Wqkv.bias", "mlp.c_fc": "mlp.fc1",
            "mlp.c_proj": "mlp.fc2"}
    towers = (("visual", video_width, ("ln_pre", "ln_post")), ("textual", text_width, ("ln_final",)))
    for tower, width, ends in towers:
        shapes |= {f"{tower}.{n}.{k}": (width,) for n in ends for k in ("weight", "bias")}
        for i in range(layers):
            block = {"attn.in_proj_weight": (3 * width, width), "attn.in_proj_bias": (3 * width,),
                     "attn.out_proj.weight": (width, width), "attn.out_proj.bias": (width,),
                     "mlp.c_fc.weight": (4 * width, width), "mlp.c_fc.bias": (4 * width,),
                     "mlp.c_proj.weight": (width, 4 * width), "mlp.c_proj.bias": (width,)}
            block |= {f"{n}.{k}": (width,) for n in ("ln_1", "ln_2") for k in ("weight", "bias")}
            for name, shape in block.items():
                for plain, quick in fast.items() if flash and tower == "visual" else ():
                    name = name.replace(plain, quick)
                shapes[f"{tower}.transformer.resblocks.{i}.{name}"] = shape
    return {f"module.{k}": torch.randn(shape) * 0.2 for k, shape in shapes.items()}


def avion_model(folder, act="gelu", text=True, frames=6):
    tower = dict(hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=2,
                 hidden_act=act)
    words = dict(vocab_size=40, max_position_embeddings=12, bos_token_id=38, eos_token_id=2, pad_token_id=0)
    CLIPConfig(text_config=tower | words, vision_config=tower, projection_dim=16).save_pretrained(folder)
    model = common.TwoTower(common.VisionEncoder(VIT, 8, False, 32, frames=frames),
                            common.TextEncoder(str(folder), 8, False, 12) if text else None)
    return model.eval()


@pytest.mark.parametrize("flash", [True, False])
def test_avion_s_weights_by_their_names(flash, tiny_vit, tmp_path):
    """Against plain transformers that use the tensors under AVION's names."""
    state = avion_state(flash)
    save_file(state, tmp_path / "avion.safetensors")
    model = avion_model(tmp_path / "clip")
    encoders.weights.init_from(model, tmp_path / "avion.safetensors")
    s = {k.removeprefix("module."): v for k, v in state.items()}

    def layers(x, tower, mask, eps):
        for i in range(LAYERS):
            get = lambda *names: next(s[k] for n in names if (k := f"{tower}.transformer.resblocks.{i}.{n}") in s)
            norm = lambda x, n: F.layer_norm(x, (WIDTH,), get(f"{n}.weight"), get(f"{n}.bias"), eps)
            y = norm(x, "ln_1") @ get("attn.Wqkv.weight", "attn.in_proj_weight").T
            y = y + get("attn.Wqkv.bias", "attn.in_proj_bias")
            q, k, v = y.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=mask).transpose(1, 2).flatten(2)
            x = x + y @ get("attn.out_proj.weight").T + get("attn.out_proj.bias")
            y = norm(x, "ln_2") @ get("mlp.fc1.weight", "mlp.c_fc.weight").T + get("mlp.fc1.bias", "mlp.c_fc.bias")
            y = F.gelu(y)
            x = x + y @ get("mlp.fc2.weight", "mlp.c_proj.weight").T + get("mlp.fc2.bias", "mlp.c_proj.bias")
        return x

    norm = lambda x, n, eps: F.layer_norm(x, (WIDTH,), s[f"{n}.weight"], s[f"{n}.bias"], eps)
    clip = torch.randn(2, 6, 3, 32, 32)
    temporal = F.interpolate(s["visual.temporal_embedding"].T[None], 6, mode="linear")[0].T  # (6, width)
    patches = F.conv2d(clip.flatten(0, 1), s["visual.conv1.weight"].view(WIDTH, 3, 16, 16), stride=16)
    place = s["visual.positional_embedding"]
    x = patches.flatten(2).transpose(1, 2).unflatten(0, (2, 6)) + place[1:] + temporal[:, None]
    token = (s["visual.class_embedding"] + place[0]).expand(2, 1, -1)
    x = layers(norm(torch.cat([token, x.flatten(1, 2)], 1), "visual.ln_pre", 1e-6), "visual", False, 1e-6)
    want = norm(x[:, 0], "visual.ln_post", 1e-6) @ s["visual.image_projection"]
    assert torch.allclose(model.vision(clip)[1], want, atol=1e-4)

    ids = torch.tensor([[38, 5, 7, 39, 0], [38, 9, 39, 0, 0]])  # the highest id ends a text
    x = layers(s["textual.token_embedding.weight"][ids] + s["textual.positional_embedding"][:5], "textual", True, 1e-5)
    want = norm(x, "textual.ln_final", 1e-5)[torch.arange(2), ids.argmax(1)] @ s["textual.text_projection"]
    assert torch.allclose(model.text(ids, (ids > 0).long()), want, atol=1e-4)


def test_avion_s_true_shapes():
    """Names and shapes of the published ViT-B/16, without memory: every tensor of the model is given."""
    with torch.device("meta"):
        state = avion_state(True, 4, 12, (768, 512), 196, 49408, 77, 256)
        vision = common.VisionEncoder(VIT, 256, False, 224, frames=4)
        config = CLIPConfig(text_config=dict(hidden_act="gelu"), vision_config={}).to_dict()
        model = common.TwoTower(vision, common.TextEncoder("clip", 256, False, 77, config=config))
    out = encoders.weights.of_avion(model, {k.removeprefix("module."): v for k, v in state.items()})
    own = {k: v.shape for k, v in model.state_dict().items()}
    assert {k: v.shape for k, v in out.items()} == own and len(own) > 300


def test_weights_that_the_video_tower_cannot_take(tiny_vit, tmp_path):
    file, model = tmp_path / "a.safetensors", avion_model(tmp_path / "clip")
    alone = common.TwoTower(common.VisionEncoder("small", 8), None)
    fits = avion_state(True)
    for state, tower, words in (
            (fits, avion_model(tmp_path / "quick", "quick_gelu"), "has GELU, .*quick has not"),
            (fits, alone, "load it into --image-encoder video_vit_base_patch16_clip_224"),
            (avion_state(True, layers=3), model, r"first \S+layers.2\S+ \S+; it is for --image-encoder video_vit"),
            (avion_state(True, layers=1), model, r"first vision.body.vit.blocks.1\S+ \S+; it is for")):
        save_file(state, file)
        with pytest.raises(UserError, match=words):
            encoders.weights.init_from(tower, file)
    save_file(fits, file)
    encoders.weights.init_from(avion_model(tmp_path / "clip", text=False), file)
