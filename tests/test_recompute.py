"""--grad-checkpointing: layers run again on the way back, and the run is the same to the bit."""

import common
from contrastive.encoders.base import recompute
from contrastive.engine.processes import UserError

import pytest
import torch

import mama
import mmts
import ncl
import temo
import temperature_schedules as ts
from helpers import equal_files, run_script

SCRIPTS = {"temo": temo, "ts": ts, "ncl": ncl, "mmts": mmts, "mama": mama}
TOY = ["--cpu", "--dataset", "moving-emoji", "--clips", "48", "16", "16", "--image-size", "32", "--frames", "2",
       "--batch-size", "8", "--max-steps", "3", "--warmup-epochs", "0", "--eval-every", "0", "--save-every", "0",
       "--workers", "0"]


def trained(line, folder, layer, *more):
    """Weights and buffers after three steps of a script, and how often a kind of layer has run in training."""
    script, *flags = line.split()
    times = 0

    def count(module, *_):
        nonlocal times
        times += type(module).__name__ == layer and module.training
    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        run_script(SCRIPTS[script], folder, *flags, *more, base=TOY)
    finally:
        hook.remove()
    return folder / "model.safetensors", times


LINES = {  # what trains, and the layer that runs again; test_resnet has BatchNorm, the texts dropout
    "chunks": ("temo --image-encoder test_vit --chunk-size 4", "Block"),
    "bf16": ("temo --image-encoder test_vit --mixed-precision bf16", "Block"),
    "BatchNorm": ("temo --image-encoder test_resnet", "BatchNorm2d"),
    "text": ("temo --text-encoder BERT --text-length 12", "BertIntermediate"),
    "text, chunks": ("temo --text-encoder CLIP --text-length 12 --chunk-size 4", "CLIPMLP"),
    "all frames": ("mmts --image-encoder video_vit_tiny_patch16_224 --num-clusters 4", "Block"),
    "pruned": ("ts --image-encoder test_resnet --loss sdclr", "BatchNorm2d"),
    "look-ahead": ("mama --image-encoder test_vit --text-encoder BERT --text-length 12 --meta-size 8 "
                   "--meta-batch-size 8", "Block")}


@pytest.mark.parametrize("name", LINES)
def test_weights_and_statistics_are_the_same(name, tiny, tmp_path):
    line, layer = LINES[name]
    line = line.replace("BERT", tiny("bert")[0]).replace("CLIP", tiny("clip")[0])
    plain, once = trained(line, tmp_path / "plain", layer)
    again, twice = trained(line, tmp_path / "again", layer, "--grad-checkpointing")
    assert twice > once and equal_files(plain, again)


def test_a_resume_may_change_it(tmp_path):
    trained("temo --image-encoder test_vit", tmp_path / "run", "Block", "--save-every", 2)
    whole = (tmp_path / "run" / "model.safetensors").rename(tmp_path / "whole.safetensors")
    (tmp_path / "run" / "checkpoints" / "step_3.pt").unlink()
    temo.main(temo.parse_args(["--resume", str(tmp_path / "run"), "--grad-checkpointing"]))
    assert equal_files(tmp_path / "run" / "model.safetensors", whole)


def test_an_encoder_without_it_is_refused():
    with pytest.raises(UserError, match="neither encoder"):
        recompute(common.TwoTower(common.VisionEncoder("small", 8), None))
