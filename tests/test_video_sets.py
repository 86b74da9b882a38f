"""Video sets by name, on replicas of their authors' files and of the hub's."""

import itertools
import json
import os
import pickle
from pathlib import Path

import common
from contrastive import data as data_sets
from contrastive.data.annotations import Files

import numpy as np
import pytest
import torch

from helpers import TEXT, complains, numbers, write_clips, write_json, write_rows, write_video

SHOWN = [0, 2, 5, 7]  # of eight frames, four spread


def check(data, expected):
    """expected: (key, captions, number of its clip) in order."""
    assert len(data) == len(expected)
    for i, (key, captions, k) in enumerate(expected):
        example = data[i]
        assert (example["key"], example["captions"], data.captions(i)) == (key, captions, captions)
        assert example["pixels"].shape == (4, 3, 64, 96) and example["pixels"].dtype == torch.uint8
        assert numbers(example["pixels"]) == [8 * k + j for j in SHOWN]


def lines(prefix, n=3):
    return [f"{prefix}, sentence {k}" for k in range(n)]


def clip4clip_msrvtt(root):
    """The layout of CLIP4Clip's download; video3 is not there."""
    names = {0: "video0.mp4", 1: "video1.mp4", 2: "video2.mp4", 4: "video7010.mp4", 5: "video7011.mp4"}
    write_clips(root / "videos" / "all", names)
    notes = root / "msrvtt_data"
    write_rows(notes / "MSRVTT_train.9k.csv", ["video_id"], [[f"video{k}"] for k in (0, 1, 2, 3)])
    write_rows(notes / "MSRVTT_JSFUSION_test.csv", ["key", "vid_key", "video_id", "sentence"],
               [("ret0", "msr7010", "video7010", "a test, with a comma"), ("ret1", "msr7011", "video7011", "another"),
                ("ret2", "msr7012", "video7012", "gone")])
    order = ("video0", "video7010", "video1", "video2", "video3")
    sentences = [{"sen_id": 9 * k + j, "video_id": v, "caption": lines(v)[j]}
                 for j in range(3) for k, v in enumerate(order)]
    about = [{"video_id": "video0", "url": "", "split": "train", "category": 3, "start time": 1.0, "end time": 2.0,
              "id": 0}]
    content = {"info": {}, "sentences": sentences, "videos": about}
    (notes / "MSRVTT_data.json").write_text(json.dumps(content))
    return {"data_dir": str(notes), "video_dir": str(root / "videos"), "frames": 4}


def test_msrvtt_as_clip4clip_has_it(tmp_path):
    options = clip4clip_msrvtt(tmp_path)
    train = common.load_data("msrvtt", "train", **options)
    check(train, [(f"video{k}", lines(f"video{k}"), k) for k in range(3)])
    assert "1 videos (3 rows) are not in" in train.note and "video3" in train.note
    assert "3 examples, 9,000 expected" in train.note
    test = common.load_data("msrvtt", "test", **options)
    check(test, [("video7010", ["a test, with a comma"], 4), ("video7011", ["another"], 5)])
    assert test.split == "test" and "video7012" in test.note and not test.grouped
    assert train.labels.tolist() == [3, -1, -1] and train.label_names[18] == "beauty"
    complains("msrvtt", "val", "msrvtt has no val split; it has: train, test", **options)


def test_msrvtt_as_rows_of_json(tmp_path):
    """The clips are cut already: start and end time are no window; the category is a number."""
    write_clips(tmp_path / "MSRVTT_Videos", {0: "video0.mp4", 1: "video1.mp4", 2: "video7010.mp4"})
    rows = [{"video_id": v, "video": f"{v}.mp4", "caption": said, "category": 18, "start time": 5.0, "end time": 9.0}
            for v, said in (("video0", lines("a", 20)), ("video1", lines("b", 20)), ("video5", ["c"]))]
    write_json(tmp_path / "msrvtt_train_9k.json", rows)
    write_json(tmp_path / "msrvtt_test_1k.json", [rows[0] | {"video": "video7010.mp4", "caption": "one string"}])
    here, below = str(tmp_path), str(tmp_path / "MSRVTT_Videos")
    for options in ({"data_dir": here}, {"video_dir": here}, {"data_dir": here, "video_dir": below}):
        train = common.load_data("msrvtt", "train", frames=4, **options)
        check(train, [("video0.mp4", lines("a", 20), 0), ("video1.mp4", lines("b", 20), 1)])
        assert "video5" in train.note and train.labels.tolist() == [18, 18]
        check(common.load_data("msrvtt", "test", frames=4, **options), [("video7010.mp4", ["one string"], 2)])


def test_msvd(tmp_path):
    ids = {"train": ["-4wsuPCjDBc_5_15", "0lh_UWF9ZP4_62_69", "gone_1_2"], "val": ["abc_1_2"], "test": ["def.g_3_4"]}
    every = sum(ids.values(), [])
    write_clips(tmp_path / "YouTubeClips", dict(enumerate(f"{v}.avi" for v in every if v != "gone_1_2")))
    for split, names in ids.items():
        (tmp_path / f"{split}_list.txt").write_bytes(" \r\n".join(names).encode() + b"\r\n\r\n")
    words = {v: [["a", "man", str(k)] for k in range(5)] for v in every}
    (tmp_path / "raw-captions.pkl").write_bytes(pickle.dumps(words, protocol=2))
    said, place = [f"a man {k}" for k in range(5)], itertools.count()
    for split, names in ids.items():
        data = common.load_data("msvd", split, data_dir=str(tmp_path), frames=4)
        check(data, [(v, said, next(place)) for v in names if v != "gone_1_2"])
        assert data.grouped is True and ("gone_1_2" in data.note) == (split == "train")
    rows = [("abc_1_2.avi", ["a man", "a man", "music"])]
    write_rows(tmp_path / "hub" / "msvd_test.json", ["video", "caption"], rows)
    hub = common.load_data("msvd", "test", data_dir=str(tmp_path / "hub"), video_dir=str(tmp_path), frames=4)
    assert hub.captions(0) == ["a man", "a man", "music"]  # twice is two queries: the papers count 27,763


def test_activitynet_joins_its_sentences_and_leaves_out_what_has_none(tmp_path):
    write_clips(tmp_path / "videos", {0: "v_aaaaaaaaaa1.mp4", 1: "bbbbbbbbbb2.mp4", 2: "v_cccccccccc3.webm"})

    def write(file, **sentences):
        notes = {v: {"duration": 8.0, "timestamps": [[0.0, 0.5], [0.4, 0.8]], "sentences": said}
                 for v, said in sentences.items()}
        (tmp_path / file).write_text(json.dumps(notes))

    write("train.json", v_aaaaaaaaaa1=[" It begins. ", " It ends."], v_cccccccccc3=[], v_bbbbbbbbbb2="one text",
          v_dddddddddd4=["gone"])
    write("val_1.json", v_cccccccccc3=["It is.", "It was."])
    write("val_2.json", v_aaaaaaaaaa1=["another"])
    options = {"data_dir": str(tmp_path), "video_dir": str(tmp_path / "videos"), "frames": 4}
    train = common.load_data("activitynet", "train", **options)
    check(train, [("v_aaaaaaaaaa1", ["It begins. It ends."], 0), ("v_bbbbbbbbbb2", ["one text"], 1)])
    assert "v_dddddddddd4" in train.note and "1 without a caption" in train.note
    test = common.load_data("activitynet", "test", **options)
    check(test, [("v_cccccccccc3", ["It is. It was."], 2)])


def test_didemo_joins_its_descriptions_and_keeps_to_thirty_seconds(tmp_path):
    write_video(tmp_path / "1@N02_1_a.mov", range(80), fps=2)  # 40 seconds
    write_video(tmp_path / "2@N02_2_b.mp4", range(100, 120), fps=2)
    said = [("1@N02_1_a.mov", "first a."), ("2@N02_2_b.m4v", "first b."), ("1@N02_1_a.mov", "then a."),
            ("3@N02_3_c.avi", "gone.")]
    rows = [{"video": v, "description": d, "times": [[0, 0]], "num_segments": 6, "annotation_id": k, "dl_link": ""}
            for k, (v, d) in enumerate(said)]
    (tmp_path / "train_data.json").write_text(json.dumps(rows))
    (tmp_path / "val_data.json").write_text(json.dumps(rows[1:2]))
    train = common.load_data("didemo", "train", data_dir=str(tmp_path), frames=60)
    assert [train.captions(i) for i in range(len(train))] == [["first a. then a."], ["first b."]]
    assert "3@N02_3_c.avi" in train.note
    assert numbers(train.read(0)) == list(range(60))  # 30 s at 2 a second
    assert set(numbers(train.read(1))) == set(range(100, 120))
    assert len(common.load_data("didemo", "val", data_dir=str(tmp_path), frames=4)) == 1


def test_didemo_in_the_hub_s_layout_is_the_same_set(tmp_path):
    write_video(tmp_path / "a.mov", range(80), fps=2)  # 40 seconds
    write_rows(tmp_path / "didemo_train.json", ["video", "caption"], [("a.mov", ["first a.", "then a."])])
    train = common.load_data("didemo", "train", data_dir=str(tmp_path), frames=60)
    assert train.captions(0) == ["first a. then a."] and numbers(train.read(0)) == list(range(60))
    complains("didemo", "val", "no annotation file of its val split", data_dir=str(tmp_path))


def youcook2_database():
    parts = {"yt1": ("training", [[2.0, 4.0], [6.0, 8.5]]), "yt2": ("validation", [[1.0, 3.0]]),
             "yt3": ("training", [[0.0, 1.0]])}
    database = {}
    for v, (subset, windows) in parts.items():
        steps = [{"id": k, "segment": w, "sentence": f"step {k} of {v}"} for k, w in enumerate(windows)]
        database[v] = {"subset": subset, "recipe_type": "101", "duration": 10.0, "video_url": "", "annotations": steps}
    return {"database": database}


def test_youcook2_reads_the_window_of_each_step(tmp_path):
    for name in ("raw_videos/training/101/yt1.mp4", "raw_videos/validation/101/yt2.webm"):
        write_video(tmp_path / name, range(100), "libvpx-vp9" if name.endswith("webm") else "libx264")
    (tmp_path / "annotations").mkdir()
    file = tmp_path / "annotations" / "youcookii_annotations_trainval.json"
    file.write_text(json.dumps(youcook2_database()))
    train = common.load_data("youcook2", "train", data_dir=str(tmp_path), frames=4)
    assert [train.captions(i) for i in range(len(train))] == [["step 0 of yt1"], ["step 1 of yt1"]]
    assert "yt3" in train.note
    assert numbers(train.read(0)) == [20, 26, 33, 39] and numbers(train.read(1)) == [60, 68, 76, 84]
    assert train.key(0) != train.key(1) and "yt1" in train.key(0) and "2-4 s" in train.key(0)
    test = common.load_data("youcook2", "test", data_dir=str(tmp_path), frames=4)
    assert test.captions(0) == ["step 0 of yt2"] and numbers(test.read(0)) == [10, 16, 23, 29]
    vast = common.load_data("youcook2", "test", data_dir=str(tmp_path), frames=4, frame_sampling="random")
    assert numbers(vast.read(0)) == [12, 17, 22, 27]  # the middles of four segments


def test_youcook2_as_the_hub_has_it(tmp_path):
    """Parquet rows beside a folder of videos that is itself called val."""
    write_video(tmp_path / "YouCookIIVideos" / "val" / "101" / "yt2.mp4", range(100))
    columns = ["id", "video_url", "recipe_type", "segment", "sentence", "video_path", "youtube_id"]
    rows = [(k, "", "101", [1.0 + 3 * k, 3.0 + 3 * k], f"step {k}", "YouCookIIVideos/val/101/yt2.mp4", "yt2")
            for k in range(2)]
    write_rows(tmp_path / "data" / "val-00000-of-00001.parquet", columns, rows)
    test = common.load_data("youcook2", "test", data_dir=str(tmp_path), frames=4)
    assert [test.captions(k) for k in range(len(test))] == [["step 0"], ["step 1"]]
    assert numbers(test.read(1)) == [40, 46, 53, 59]


def test_howto100m_is_one_example_a_line_of_speech(tmp_path):
    for k, name in enumerate(("aaa.mp4", "bbb.webm", "silent.mp4", "other.mp4")):
        codec = "libvpx-vp9" if name.endswith("webm") else "libx264"
        write_video(tmp_path / "videos" / name, range(100 * k % 200, 100 * k % 200 + 50), codec)
    speech = {"aaa": {"start": [0.0, 1.0, 3.0], "end": [0.4, 2.0, 3.4], "text": ["a zero", "a one", "a two"]},
              "gone": {"start": [0.0], "end": [1.0], "text": ["never"]},
              "silent": {"start": [], "end": [], "text": []},
              "bbb": {"start": [2.5, 4.0], "end": [2.9, 4.4], "text": ["b zero", "b one"]}}
    (tmp_path / "caption.json").write_text(json.dumps(speech))
    options = {"data_dir": str(tmp_path), "video_dir": str(tmp_path / "videos"), "frames": 4}
    data = common.load_data("howto100m", "train", **options)
    assert [data.captions(i) for i in range(len(data))] == [["a zero"], ["a one"], ["a two"], ["b zero"], ["b one"]]
    frames = [numbers(data.read(i)) for i in range(5)]
    assert frames == [[0, 1, 2, 3], [10, 13, 16, 19], [30, 31, 32, 33], [125, 126, 127, 128], [140, 141, 142, 143]]
    assert len({data.key(i) for i in range(5)}) == 5 and all("aaa" in data.key(i) for i in range(3))
    assert "1 videos (1 rows) are not in" in data.note and data[4]["captions"] == ["b one"]
    complains("howto100m", "test", "howto100m has no test split", data_dir=str(tmp_path))


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
    complains("ssv2-lt", "val", "no annotation file of its val split", data_dir=str(tmp_path / "labels"))
    (tmp_path / "labels" / "trainval.csv").write_text("original_vido_id\n105 0 0 a.jpg\n201 0 0 a.jpg\n")
    for split, keys, expected in (("train", ["101", "105"], "50,418"), ("test", ["201"], "2,610"),
                                  ("val", ["105", "201"], "6,960")):  # whichever of the two files of labels has them
        data = read(split)
        assert list(data.keys()) == keys and f"{expected} expected" in data.note and data.clip.at_rest == "middle"
    assert numbers(read("test").read(0)) == [201, 203, 206] and read("train").captions(1) == ["holding thing 105"]
    assert read("train").label_names == ["Holding something", "Moving something up"]
    assert read("train").labels.tolist() == [0, 1] and "1 videos (1 rows) are not in" in read("train").note


# ---------------------------------------------------- what can be wrong with them ------------------------------------


def test_a_set_without_its_videos_or_annotations(tmp_path):
    complains("msrvtt", "train", "msrvtt", "--video-dir", "--data-dir")
    options = clip4clip_msrvtt(tmp_path / "a")
    empty, nowhere = str(tmp_path / "empty"), str(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    complains("msrvtt", "train", "none of 4 videos", empty, "--video-dir", **options | {"video_dir": empty})
    complains("msrvtt", "train", nowhere, "--video-dir", **options | {"video_dir": nowhere})
    complains("msrvtt", "test", "MSRVTT_JSFUSION_test.csv", empty, "--data-dir", **options | {"data_dir": empty})
    speech = {"data_dir": empty, "video_dir": options["video_dir"]}
    complains("howto100m", "train", "caption.json", "--data-dir", **speech)
    lines_of = {"zzz": {"start": [0.0], "end": [1.0], "text": ["x"]}}
    (tmp_path / "empty" / "caption.json").write_text(json.dumps(lines_of))
    complains("howto100m", "train", "none of 1 videos", "--video-dir", **speech)
    os.remove(Path(options["data_dir"]) / "MSRVTT_data.json")
    complains("msrvtt", "train", "MSRVTT_data.json", options["data_dir"], **options)



@pytest.mark.parametrize("name, split, file", [
    ("msrvtt", "train", "MSRVTT_data.json"), ("activitynet", "train", "train.json"),
    ("didemo", "train", "train_data.json"), ("youcook2", "train", "youcookii_annotations_trainval.json"),
    ("howto100m", "train", "caption.json"), ("msrvtt", "test", "msrvtt_test_1k.json")])
def test_a_damaged_annotation_file_is_named(name, split, file, tmp_path):
    write_clips(tmp_path, {0: "yt1.mp4"})
    (tmp_path / "MSRVTT_train.9k.csv").write_text("video_id\nvideo0\n")
    for content in (b'{"database": {"yt1"', b"[1, 2, 3]", b'{"a": 1}', b"\xff\xfe\x00damaged"):
        (tmp_path / file).write_bytes(content)
        data_sets._named.cache_clear()
        complains(name, split, file, data_dir=str(tmp_path))


class Attack:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_a_pickle_is_data_or_refused(tmp_path):
    write_clips(tmp_path, {0: "v0.avi"})
    (tmp_path / "train_list.txt").write_text("v0\n")
    complains("msvd", "train", "raw-captions.pkl", str(tmp_path), data_dir=str(tmp_path))
    bad = [pickle.dumps({"v0": Attack(tmp_path / "marker")}, protocol=p) for p in (0, 2, 4)]
    bad += [b"cos\nsystem\n(S'touch " + str(tmp_path / "marker").encode() + b"'\ntR.", b"cbuiltins\neval\n(S'1'\ntR."]
    for data in bad:
        (tmp_path / "raw-captions.pkl").write_bytes(data)
        asked = "eval" if b"eval" in data else "system"
        complains("msvd", "train", "raw-captions.pkl", asked, data_dir=str(tmp_path))
    for data in (pickle.dumps({"v0": [["a"]]})[:-5], b"", TEXT):
        (tmp_path / "raw-captions.pkl").write_bytes(data)
        complains("msvd", "train", "raw-captions.pkl", data_dir=str(tmp_path))
    assert not (tmp_path / "marker").exists()
    plain = {"a": [1, 2.5, "x", None, True, (1, 2), {3}, frozenset([4]), b"bytes"],
             "b": np.arange(6.0).reshape(2, 3), "c": np.float32(2), "d": np.array(["a", "bc"])}
    for protocol in range(6):
        (tmp_path / "plain.pkl").write_bytes(pickle.dumps(plain, protocol=protocol))
        back = Files(tmp_path).pickle("plain.pkl")
        assert back["a"] == plain["a"] and all(np.array_equal(back[k], plain[k]) for k in "bcd")
