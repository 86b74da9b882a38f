"""What MAMA's meta-data are on the paper's retrieval sets (Sec. 3.2): classes, or clusters of captions, in turn."""

import json
from collections import Counter

import common
from contrastive import data as data_sets
from contrastive import evaluation
from contrastive.data import open_data
from contrastive.engine.processes import UserError
from contrastive.evaluation.meta import balanced_rows, meta_data

import numpy as np
import pytest

import mama
from helpers import run_script, write_rows, write_video
from tools import figures as several

SMALL = ("--workers 0 --cpu --image-encoder small --text-encoder small --no-pretrained --embed-dim 16 "
         "--image-size 32 --frames 2 --text-length 16 --text-pooling mean --log-every 1 --batch-size 8 --max-steps 2 "
         "--meta-batch-size 2 --lr 1e-3").split()

CATEGORY = {**{k: 0 if k < 9 else 7 if k < 11 else 19 for k in range(12)}, 12: 0, 13: 7, 14: 19, 15: 19}  # 12..: test


def msrvtt(root, categories=CATEGORY):
    """CLIP4Clip's layout: 12 videos of three categories for training, four for test."""
    for k in range(16):
        write_video(root / "videos" / f"video{k}.mp4", [5 * k, 5 * k + 1])
    write_rows(root / "MSRVTT_train.9k.csv", ["video_id"], [[f"video{k}"] for k in range(12)])
    write_rows(root / "MSRVTT_JSFUSION_test.csv", ["key", "vid_key", "video_id", "sentence"],
               [(f"ret{k}", f"msr{k}", f"video{k}", f"clip number {k}") for k in range(12, 16)])
    about = [{"video_id": f"video{k}", "split": "train", "category": c} for k, c in categories.items()]
    said = [{"sen_id": k, "video_id": f"video{k % 16}", "caption": f"words {k % 16} of {'abcd'[k % 4]}"}
            for k in range(32)]
    (root / "MSRVTT_data.json").write_text(json.dumps({"videos": about, "sentences": said}))
    return ["--dataset", "msrvtt", "--data-dir", str(root), "--video-dir", str(root / "videos"), *SMALL]


def opened(flags, *more):
    """(training data, evaluation sets, flags)."""
    args = mama.parse_args([*flags, *map(str, more)])
    return *open_data(args), args


def meta_of(train, evals, args):
    return meta_data(train, evals, args.dataset, args.meta_set, args.meta_size, args.meta_batch_size, args.task,
                     args.meta_balance)[0]


def test_meta_data_of_msrvtt_are_balanced(tmp_path):
    """Two of each of three categories, of which one has three quarters of the rows; further pairs take no class away
    and are no meta-data."""
    flags = msrvtt(tmp_path)
    meta = meta_of(*opened(flags, "--meta-size", 3))
    assert Counter(meta.labels.tolist()) == {0: 1, 7: 1, 19: 1}
    assert meta.note.startswith("3 of train, balanced over label, not known to be clean: captions as the set has them")
    for k in range(3):
        write_video(tmp_path / "more" / f"w{k}.mp4", [k, 1])
    write_rows(tmp_path / "more.csv", ["video", "caption"], [(f"w{k}.mp4", f"speech {k}") for k in range(3)])
    both, evals, args = opened(flags, "--meta-size", 3, "--extra-pairs", f"{tmp_path / 'more.csv'}={tmp_path / 'more'}")
    assert both.labels is None and len(both) > 12
    assert sorted(meta_of(both, evals, args).column("key")) == sorted(meta.column("key"))
    assert "balanced over label" in meta_of(both, evals, args).note
    meta = meta_of(*opened(flags, "--meta-size", 6, "--meta-balance", "none"))
    assert "at random" in meta.note and "would balance them" not in meta.note


def talk(counts):
    """Data of captions about so many different things, each said so many times in two sentences a row."""
    words = ("cat dog horse bird fish cow").split()
    captions = [[f"a {words[c]} runs", f"{words[c]} {words[c]}"] for c, n in enumerate(counts) for _ in range(n)]
    names = [f"{k}.mp4" for k in range(len(captions))]
    return common.Data("talk", "train", common.make_table(captions, names)), np.repeat(range(len(counts)), counts)


def test_clusters_of_captions_in_turn():
    """Each of six things comes as often, but where there are no more; and no number of --seed decides."""
    data, kind = talk([100, 40, 20, 10, 5, 1])
    found, how = balanced_rows(data, 24, (), captions=True)
    counts = Counter(kind[found].tolist())
    assert sorted(counts.values()) == [1, 4, 4, 5, 5, 5] and counts[5] == 1
    assert how.startswith("balanced over 6 clusters of captions, not known to be clean")
    assert found.tolist() == balanced_rows(data, 24, (), captions=True)[0].tolist() and len({*found.tolist()}) == 24
    plain, how = balanced_rows(data, 24, ())
    assert how.startswith("at random") and max(Counter(kind[plain].tolist()).values()) > 8
    assert balanced_rows(data, 24)[0].tolist() == plain.tolist()           # without classes: as before


def test_only_the_first_rows_by_hash_are_clustered(monkeypatch):
    data, kind = talk([30, 30])
    monkeypatch.setattr(evaluation.meta, "CLUSTERED", 10)
    seen, true = [], evaluation.meta.caption_clusters
    monkeypatch.setattr(evaluation.meta, "caption_clusters", lambda d, r: seen.append(len(r)) or true(d, r))
    assert len(balanced_rows(data, 4, (), captions=True)[0]) == 4
    assert len(balanced_rows(data, 20, (), captions=True)[0]) == 20 and seen == [10, 20]
    wordless = common.Data("x", "train", common.make_table([["a"], ["b"]], ["0", "1"]))
    with pytest.raises(UserError, match="tf-idf"):
        balanced_rows(wordless, 1, (), captions=True)


def test_the_flag_chooses(tmp_path):
    """auto is as it was: classes, else chance, and a word of what would help; classes are refused where none are."""
    for k in range(14):
        write_video(tmp_path / f"v{k}.mp4", [1, 2])
    write_rows(tmp_path / "own.csv", ["video", "caption", "split"], [
        (f"v{k}.mp4", f"a {'cat' if k % 4 else 'dog'} {k % 2}", ("train", "val", "test")[max(0, k - 11)])
        for k in range(14)])
    flags = ["--dataset", str(tmp_path / "own.csv"), *SMALL, "--meta-size", "6"]
    auto, none, captions = (meta_of(*opened(flags, "--meta-balance", how)) for how in ("auto", "none", "captions"))
    assert auto.column("key") == none.column("key")
    assert "clusters of captions, not known to be clean" in captions.note
    assert captions.column("key") != auto.column("key") and mama.parse_args(flags).meta_balance == "auto"
    with pytest.raises(UserError, match="--meta-balance classes: .*own.csv has no column label or verb"):
        meta_of(*opened(flags, "--meta-balance", "classes"))


def test_meta_data_of_unfolded_rows_are_of_as_many_clips():
    """With --unfold-captions the rows of a clip share its name; they would follow each other."""
    captions = [[f"clip {i} take {k}" for k in range(5)] for i in range(60)]
    table = common.make_table(captions, [f"v{i}" for i in range(60)], classes={"label": list("abcdef")},
                              label=[i % 6 for i in range(60)])
    data = common.Data("x", "train", table)
    for captions_too in (False, True):
        rows, _ = balanced_rows(data.unfold(), 30, () if captions_too else ("label",), captions_too)
        assert len({data.unfold().key(i) for i in rows}) == 30
    folded, unfolded = (balanced_rows(d, 30)[0] for d in (data, data.unfold()))
    assert {data.key(i) for i in folded} == {data.unfold().key(i) for i in unfolded}


def test_neighbours_are_clips_and_topics_are_of_captions(tmp_path, monkeypatch, capsys):
    """Rows of --unfold-captions: kNN encodes each clip once. Figs. 2 and 5a: an LDA of the captions of a clip together,
    known words decide a query's topic, a query without one is left out."""
    files = msrvtt(tmp_path)
    flags = [*files, "--meta-size", "4", "--unfold-captions"]
    seen, encode = [], evaluation.by_class.encode_images
    monkeypatch.setattr(evaluation.by_class, "encode_images", lambda model, data, *more, **k: (
        seen.append(list(data.keys())), encode(model, data, *more, **k))[1])
    run_script(mama, tmp_path / "mama", *flags)
    assert seen and all(len(keys) == len(set(keys)) for keys in seen)
    table = common.make_table([["cats purr", "a cat purrs"], ["cats meow purr"], ["cars drive", "cars race"],
                               ["cars drive race"]] * 5, [f"v{k}" for k in range(20)])
    data = common.Data("x", "train", table).unfold()
    clips, queries, names = several.topics_of(data, ["the cats purr", "cars race", "unheard of"], 2)
    assert len(clips) == 20 and len(set(clips[:2])) == len(set(clips[2:4])) == 1 and clips[0] != clips[2]
    assert queries.tolist() == [clips[0], clips[2], -1]
    assert "cats" in names[clips[0]] and "cars" in names[clips[2]]
    run_script(mama, tmp_path / "infonce", *files[:-4], "--loss", "infonce", "--unfold-captions")
    folders = [str(tmp_path / "infonce"), str(tmp_path / "mama")]
    with pytest.raises(UserError, match="none of its 4 queries has a topic"):
        several.main(["concepts", *folders, "--topics", "2", "--out", str(tmp_path / "t.png")])
    sentences = tmp_path / "MSRVTT_JSFUSION_test.csv"
    sentences.write_text(sentences.read_text().replace("clip number", "words").replace("words 15", "clip 15"))
    data_sets._named.cache_clear()
    several.main(["concepts", *folders, "--topics", "2", "--out", str(tmp_path / "t.png")])
    said = capsys.readouterr().out
    assert "1 of 4 queries have no topic and are left out" in said and "% of the training rows, gain" in said
    assert "nan" not in said and "gain - (the first run has no hit)" in said
    assert (tmp_path / "t.png").stat().st_size > 5000
