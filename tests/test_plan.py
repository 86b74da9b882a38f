"""--plan: memory by arithmetic, without data, weights or a card; and chunks that recipes bring."""

from contrastive.engine.plan import floor_of, saved_bytes

import pytest
import torch

import mama
import mmts
import ncl
import temo
import temperature_schedules as ts
from helpers import refused

SCRIPTS = (temo, ts, ncl, mmts, mama)
SMALL = {temo: "emoji", ts: "emoji", ncl: "moving-emoji", mmts: "moving-emoji", mama: "moving-emoji"}


def planned(script, capsys, *flags):
    """The lines that --plan prints, {word: text}; it ends well, before any data are looked for."""
    with pytest.raises(SystemExit) as end:
        script.parse_args([*map(str, flags)])
    said, wrong = capsys.readouterr()
    assert end.value.code in (0, None), wrong
    title, *lines = said.splitlines()
    assert title.startswith(f"{script.__name__}.py")
    return {line[2:18].strip(): line[19:] for line in lines}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_every_script_plans(script, capsys):
    lines = planned(script, capsys, "--dataset", SMALL[script], "--plan", 2, "--gpu-memory", 4)
    assert lines["verdict"] == "fits as it is" and "2 cards of 4 GB" in lines["for each of"]
    assert ("look-ahead" in lines) == (script is mama)


def test_a_recipe_without_its_hub(capsys):
    """What this machine cannot download has a stand-in of the same size; the chunk that is named does fit."""
    flags = ["--dataset", "msrvtt", "--frames", 1, "--gpu-memory", 8, "--plan"]
    lines = planned(ncl, capsys, *flags, "--chunk-size", 0)
    assert lines["parameters"].startswith("151.3 M") and "1 frames 37.8" in lines["activations"]  # CLIP ViT-B/32
    assert "does not fit; --chunk-size 64 does" in lines["verdict"]
    assert planned(ncl, capsys, *flags, "--chunk-size", 64)["verdict"] == "fits as it is"
    assert "does not fit" in planned(ncl, capsys, *flags, "--chunk-size", 96)["verdict"]


def test_flags_that_take_memory_change_the_plan(capsys):
    def gb(*flags):
        lines = planned(mama, capsys, "--dataset", "moving-emoji", "--batch-size", 4096, "--plan", *flags)
        return float(lines["whole batch"].split()[0])
    lines = planned(mama, capsys, "--dataset", "moving-emoji", "--batch-size", 4096, "--plan", "--gpu-memory", 4)
    assert "a look-ahead takes the whole batch" in lines["verdict"]
    assert gb() < gb("--meta-memory", "fast") and gb() < gb("--meta-gradient", "second-order")
    lines = [planned(mama, capsys, "--dataset", "moving-emoji", "--task", task, "--plan")["activations"]
             for task in ("qa-open", "qa-choice")]
    one, five = (float(line.split()[0]) for line in lines)
    assert five > 1.5 * one
    assert "images (clips with --video-dir)" in planned(ncl, capsys, "--dataset", "clips.csv", "--plan")["activations"]
    assert "not counted: SLIP's head" in planned(temo, capsys, "--loss", "slip", "--plan")["parameters"]
    assert planned(ts, capsys, "--dataset", "cifar10-lt", "--image-encoder", "resnet18", "--plan")["whole batch"]


def test_what_a_forward_keeps_is_counted_once():
    layer, x = torch.nn.Linear(4, 4), torch.zeros(2, 4)
    model = torch.nn.Sequential(layer, torch.nn.Tanh(), layer)
    assert saved_bytes(model, lambda: model(x)) == 2 * 4 * 2 * 4  # the input, and what tanh gives, which two keep
    assert [floor_of(n) for n in (1, 2, 3, 5, 7, 50, 100)] == [1, 2, 3, 4, 6, 48, 96]


def test_a_plan_is_refused_in_one_line(capsys):
    for flags, words in ((("--gpu-memory", "3"), "only with --plan"), (("--plan", "7"), "not divisible"),
                         (("--plan", "--text-encoder", "some/thing"), "some/thing")):
        assert words in refused(temo.parse_args, flags, capsys)


def test_the_chunk_of_a_recipe_is_of_its_encoder_and_batch():
    chunk = {flags: temo.parse_args(["--dataset", "cc12m", *flags.split()]).chunk_size
             for flags in ("", "--batch-size 64", "--image-encoder resnet50", "--chunk-size 32", "--chunk-size 0")}
    assert list(chunk.values()) == [128, 0, 0, 32, 0]
    assert all(script.parse_args([]).chunk_size == 0 for script in SCRIPTS)
    assert ncl.parse_args(["--dataset", "msvd"]).chunk_size == 32
