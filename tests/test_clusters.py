"""Clusters of captions, classes and pictures (MM-TS), and the meta-data of MAMA, which are balanced
over them."""

import functools
import json
import math
from collections import Counter
from types import SimpleNamespace

import common
from contrastive import evaluation
from contrastive.encoders.sentences import SentenceEncoder
from contrastive.evaluation.pieces import EvaluationPieces
from contrastive.core.processes import UserError
from contrastive.evaluation.clusters import Clusters, centroids, largest_first
from contrastive.evaluation.meta import balanced_rows, meta_data

import numpy as np
import pytest
import torch

import mama
import mmts
from helpers import CPU, run_script, unit, write_rows, write_video
from tools import figures as several

KINDS = ["a red apple", "the green pear", "some blue birds"]
CAPTIONS = [[f"{KINDS[i % 3]} {w}" for w in ("here", "there")] for i in (0, 0, 0, 0, 1, 1, 1, 2)]


# ------------------------------------------ K-Means and sizes ------------------------------------
def test_cluster_captions_finds_blobs_largest_first():
    truth = torch.repeat_interleave(torch.arange(4), torch.tensor([10, 40, 5, 20]))
    x = torch.eye(4)[truth] + 0.05 * torch.randn(75, 4, generator=torch.Generator().manual_seed(0))
    labels, sizes = mmts.cluster_captions(x, 4, seed=0)
    assert sizes.tolist() == [40, 20, 10, 5] == labels.bincount().tolist()
    assert all(len(labels[truth == c].unique()) == 1 for c in range(4))
    assert torch.equal(labels, mmts.cluster_captions(x, 4, seed=0)[0])


def test_cluster_captions_weights_each_by_its_count():
    labels, sizes = mmts.cluster_captions(torch.eye(4), 4, seed=0, counts=[3, 1, 9, 2])
    assert sizes.tolist() == [9, 3, 2, 1]
    assert labels.tolist() == [1, 3, 0, 2]


def test_cluster_captions_refuses_nan():
    with pytest.raises(ValueError, match="NaN"):
        mmts.cluster_captions(torch.tensor([[1.0, 0]] * 4 + [[math.nan, 0]]), 2, 0)


def test_largest_first():
    labels, sizes, names = largest_first(["b", "a", "b", "c", "b", "c"])
    assert labels.tolist() == [0, 2, 0, 1, 0, 1]
    assert sizes.tolist() == [3, 2, 1]
    assert names == ["b", "c", "a"]


def test_centroids():
    x, labels = unit(6, 3).float(), torch.tensor([0, 2, 0, 1, 0, 1])
    means = torch.stack([x[labels == c].mean(0) for c in range(3)])
    assert torch.allclose(centroids(x, labels), means)
    weighted = centroids(x, labels, [2, 1, 1, 1, 1, 1])[0]
    assert torch.allclose(weighted, (2 * x[0] + x[2] + x[4]) / 4)


# ------------------------------------------ clusters of data -------------------------------------
def made(captions, **columns):
    """Data with a row for each list of captions."""
    classes = None
    if "noun" in columns:
        classes = {"noun": ["cat", "dog", "owl"]}
    keys = [f"k{i}" for i in range(len(captions))]
    table = common.make_table(captions, keys, classes=classes, **columns)
    pixels = torch.zeros(len(captions), 3, 8, 8, dtype=torch.uint8)
    return common.Data("made", "train", table, pixels=pixels)


def opened(folder, train, source, **flags):
    """The clusters of these data, by the flags of mmts.py."""
    folder.mkdir(exist_ok=True)
    defaults = dict(clusters=str(source), cluster_encoder="tf-idf", num_clusters=3, seed=0)
    defaults.update(dataset="made", image_size=16, workers=0, resume="")
    args = SimpleNamespace(**defaults | flags)
    evaluation.clusters.check_source(train, args.clusters)
    kmeans = functools.partial(mmts.cluster_captions, seed=args.seed)
    return evaluation.clusters.open_clusters(folder, args, train, CPU, kmeans)


def test_captions_are_looked_up_by_their_words(tmp_path):
    train = made([*CAPTIONS, CAPTIONS[7]])  # the last one says what the one before it says
    clusters = opened(tmp_path / "a", train, "captions")
    assert clusters.kind == "caption"
    assert clusters.sizes.tolist() == [8, 6, 4]
    texts = ["some blue birds there", "a red apple here", "the green pear here"]
    labels, num_missing = clusters.look_up(["", "x", "y"], texts)
    assert labels.tolist() == [2, 0, 1]
    assert num_missing == 0
    unfolded = opened(tmp_path / "b", train.unfold(), "captions")
    assert torch.equal(unfolded.tensors["labels"], clusters.tensors["labels"])
    examples = json.loads((tmp_path / "a" / "clusters.json").read_text())["examples"]
    assert [e["size"] for e in examples] == [8, 6, 4]
    assert all("apple" in c for c in examples[0]["captions"])


def test_a_new_caption_has_the_cluster_of_the_nearest_centroid(tmp_path):
    """In the process that made the clusters, and in another one that reads them."""
    clusters = opened(tmp_path / "a", made(CAPTIONS), "captions")
    for same in (clusters, Clusters(tmp_path / "a", CPU)):
        labels, num_missing = same.look_up(["", ""], ["green pear", "blue birds, blue birds"])
        assert labels.tolist() == [1, 2]
        assert num_missing == 2


NOUNS = np.array([0, 0, 0, 2, 2, 1, -1, 0])


def test_classes_are_counted(tmp_path):
    train = made(CAPTIONS, noun=NOUNS)
    clusters = opened(tmp_path, train, "noun")
    assert clusters.sizes.tolist() == [4, 2, 1]
    assert clusters.meta["names"] == ["cat", "owl", "dog"]
    assert clusters.meta["without"] == 1
    labels, num_missing = clusters.look_up([f"k{i}" for i in range(8)] + ["new"], [""] * 9)
    assert labels.tolist() == [0, 0, 0, 1, 1, 2, -1, 0, -1]
    assert num_missing == 2


def test_classes_of_two_columns(tmp_path):
    train = made(CAPTIONS, noun=NOUNS, verb=np.array([1, 1, 2, 1, 1, 1, 1, 1]))
    clusters = opened(tmp_path, train.unfold(), "verb-noun")
    assert clusters.sizes.tolist() == [3, 2, 1, 1]
    assert clusters.meta["names"][0] == "1 cat"
    assert clusters.meta["without"] == 1


def test_thirds_of_queries_are_by_the_size_of_their_class(tmp_path):
    clusters = opened(tmp_path, made(CAPTIONS, noun=NOUNS), "noun")
    nouns = [0, 2, 1, -1, 0, 2, 1, 0]  # cat, owl, dog, none: of 4, 2 and 1 training examples
    x, y = unit(8, 5).float(), unit(8, 5, seed=1).float()
    pieces = EvaluationPieces(
        owner=np.arange(8),
        index=np.arange(8),
        positives=torch.arange(8)[:, None],
        texts=["x"] * 8,
        data=made([["x"]] * 8, noun=np.array(nouns)),
        text=x,
        image=y,
    )
    assert clusters.query_labels(pieces).tolist() == [0, 1, 2, -1, 0, 1, 2, 0]
    ranks = [sum(float(x[i] @ y[j]) >= float(x[i] @ y[i]) for j in range(8)) for i in range(8)]
    thirds = evaluation.clusters.head_mid_tail(pieces, clusters)["by_cluster_size"]
    for name, noun, size in (("head", 0, 4), ("mid", 2, 2), ("tail", 1, 1)):
        third = thirds[name]
        expected = [rank for rank, n in zip(ranks, nouns, strict=True) if n == noun]
        assert third["MnR"] == pytest.approx(sum(expected) / len(expected))
        assert (third["from"], third["to"], third["queries"]) == (size, size, len(expected))


def test_sentences_are_mean_pooled(tiny, tokenizer):
    texts, (folder, model) = ["a red apple here", "pear"], tiny("bert")
    tokens = tokenizer(texts)
    states, mask = model(**tokens).last_hidden_state, tokens["attention_mask"][..., None]
    expected = common.normalize((states * mask).sum(1) / mask.sum(1))
    assert torch.allclose(SentenceEncoder(folder, CPU)(texts), expected, atol=1e-5)


def test_clusters_of_pictures(tiny, tmp_path):
    train = made(CAPTIONS)
    train.pixels.copy_((torch.arange(8) % 2 * 255).view(8, 1, 1, 1))  # black and white
    flags = dict(num_clusters=2, cluster_encoder=tiny("clip")[0], image_size=32)
    for data in (train.unfold(), train):
        clusters = opened(tmp_path / "pictures", data, "vision", **flags)
        assert clusters.sizes.tolist() == [4, 4]
        assert clusters.meta["without"] == 0
    labels, _ = clusters.look_up([f"k{i}" for i in range(8)], [""] * 8)
    assert labels[::2].unique().numel() == labels[1::2].unique().numel() == 1
    assert labels[0] != labels[1]


NO_CLUSTERS = [  # source, data, words of the one line
    ("noun", made(CAPTIONS), "--clusters noun: made has no noun; --clusters captions needs none"),
    (
        "noun",
        made(CAPTIONS, noun=np.full(8, -1)),
        "--clusters noun: no example of made has a cluster",
    ),
    ("none.json", made(CAPTIONS), "none.json: .*No such file"),
    ("captions", made([["?"], ["!"], ["."]]), "--cluster-encoder tf-idf: empty vocabulary"),
]


@pytest.mark.parametrize("source, data, words", NO_CLUSTERS)
def test_what_makes_no_clusters_is_refused_in_one_line(source, data, words, tmp_path):
    with pytest.raises(UserError, match=f"^.*{words}.*$"):
        opened(tmp_path / "out", data, source)
    assert not (tmp_path / "out" / "clusters.json").exists()


# ------------------------------------------ meta-data --------------------------------------------
SMALL = (
    "--workers 0 --cpu --image-encoder small --text-encoder small --no-pretrained --embed-dim 16 "
    "--image-size 32 --frames 2 --text-length 16 --text-pooling mean --log-every 1 "
    "--batch-size 8 --max-steps 2 --meta-batch-size 2 --lr 1e-3"
).split()


def msrvtt(root):
    """CLIP4Clip's layout: 12 videos of three categories for training, four for test."""
    for k in range(16):
        write_video(root / "videos" / f"video{k}.mp4", [5 * k, 5 * k + 1])
    write_rows(root / "MSRVTT_train.9k.csv", ["video_id"], [[f"video{k}"] for k in range(12)])
    write_rows(
        root / "MSRVTT_JSFUSION_test.csv",
        ["key", "vid_key", "video_id", "sentence"],
        [(f"ret{k}", f"msr{k}", f"video{k}", f"clip number {k}") for k in range(12, 16)],
    )
    about = [
        {"video_id": f"video{k}", "split": "train", "category": 0 if k < 9 else 7 if k < 11 else 19}
        for k in range(16)
    ]
    said = [
        {"sen_id": k, "video_id": f"video{k % 16}", "caption": f"words {k % 16} of {'abcd'[k % 4]}"}
        for k in range(32)
    ]
    (root / "MSRVTT_data.json").write_text(json.dumps({"videos": about, "sentences": said}))
    folders = ["--data-dir", str(root), "--video-dir", str(root / "videos")]
    return ["--dataset", "msrvtt", *folders, *SMALL]


def meta_of(flags, *more):
    args = mama.parse_args([*flags, *map(str, more)])
    meta, _ = meta_data(*common.open_data(args), args)
    return meta


def test_meta_data_of_msrvtt_are_balanced(tmp_path):
    """One of each of three categories, of which one has three quarters of the rows, unless
    --meta-balance says otherwise."""
    flags = [*msrvtt(tmp_path), "--meta-size", "3"]
    meta = meta_of(flags)
    assert Counter(meta.labels.tolist()) == {0: 1, 7: 1, 19: 1}
    assert meta.note.startswith("3 of train, balanced over label, not known to be clean")
    assert "at random" in meta_of(flags, "--meta-balance", "none").note
    assert "clusters of captions" in meta_of(flags, "--meta-balance", "captions").note


def test_clusters_of_captions_in_turn():
    """Each of six things comes as often, but where there are no more."""
    words, counts = "cat dog horse bird fish cow".split(), [100, 40, 20, 10, 5, 1]
    captions = [
        [f"a {words[c]} runs", f"{words[c]} {words[c]}"]
        for c, n in enumerate(counts)
        for _ in range(n)
    ]
    data = common.Data(
        "talk", "train", common.make_table(captions, [f"{k}.mp4" for k in range(len(captions))])
    )
    kind = np.repeat(range(6), counts)
    found, how = balanced_rows(data, 24, by_captions=True)
    assert sorted(Counter(kind[found].tolist()).values()) == [1, 4, 4, 5, 5, 5]
    assert len({*found.tolist()}) == 24
    assert how.startswith("balanced over 6 clusters of captions")
    plain, how = balanced_rows(data, 24)
    assert how.startswith("at random") and max(Counter(kind[plain].tolist()).values()) > 8
    with pytest.raises(UserError, match="--meta-balance classes: talk has no column label or verb"):
        args = mama.parse_args(["--dataset", "talk", "--meta-balance", "classes"])
        meta_data(data, {}, args)


def test_meta_data_of_unfolded_rows_are_of_as_many_clips():
    """With --unfold-captions the rows of a clip share its name; they would follow each other."""
    data = made(
        [[f"clip {i} take {k}" for k in range(5)] for i in range(60)], noun=np.arange(60) % 3
    ).unfold()
    for column, by_captions in (("noun", False), (None, True)):
        rows, _ = balanced_rows(data, 30, column, by_captions)
        assert len({data.key(i) for i in rows}) == 30


def test_neighbours_are_clips_and_topics_are_of_captions(tmp_path, monkeypatch, capsys):
    """Rows of --unfold-captions: kNN encodes each clip once. Figs. 2 and 5a: an LDA of the captions
    of a clip together, known words decide a query's topic, a query without one is left out."""
    files = msrvtt(tmp_path)
    sentences = tmp_path / "MSRVTT_JSFUSION_test.csv"  # three of four with words of training
    sentences.write_text(
        sentences.read_text().replace("clip number", "words").replace("words 15", "clip 15")
    )
    seen, encode = [], evaluation.by_class.encode_images
    monkeypatch.setattr(
        evaluation.by_class,
        "encode_images",
        lambda model, data, *more, **k: (
            seen.append(list(data.keys())),
            encode(model, data, *more, **k),
        )[1],
    )
    run_script(mama, tmp_path / "mama", *files, "--meta-size", "4", "--unfold-captions")
    assert seen and all(len(keys) == len(set(keys)) for keys in seen)
    folders = [str(tmp_path / "mama")] * 2
    several.main(["concepts", *folders, "--topics", "2", "--out", str(tmp_path / "t.png")])
    said = capsys.readouterr().out
    assert "1 of 4 queries have no topic and are left out" in said
    assert "% of the training rows, gain" in said
    assert "nan" not in said and (tmp_path / "t.png").stat().st_size > 5000
    table = common.make_table(
        [
            ["cats purr", "a cat purrs"],
            ["cats meow purr"],
            ["cars drive", "cars race"],
            ["cars drive race"],
        ]
        * 5,
        [f"v{k}" for k in range(20)],
    )
    data = common.Data("x", "train", table).unfold()
    topics = several.Topics(data, 2)
    clips, names = topics.of_clips, topics.names
    queries = topics.of_texts(["the cats purr", "cars race", "unheard of"])
    assert len(clips) == 20
    assert len(set(clips[:2])) == len(set(clips[2:4])) == 1
    assert clips[0] != clips[2]
    assert queries.tolist() == [clips[0], clips[2], -1]
    assert "cats" in names[clips[0]] and "cars" in names[clips[2]]
