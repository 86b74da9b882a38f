"""The examples of docs/forking.md, in copies of the scripts."""

import importlib
import inspect
import re
from pathlib import Path

import common

import pytest
import torch

import eval as eval_py
import mama
import mmts
import ncl
import temo
from helpers import few_steps, fork, losses, run_script, steps, tensors_of, write_images

PAGE = Path(temo.__file__).with_name("docs") / "forking.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf8"), re.S)
FLAGS_RULER = "\n# ======================================================= flags ==="
TINY = [
    *"--cpu --workers 0 --dataset moving-emoji --clips 32 16 16 --frames 2 --image-size 16".split(),
    *"--log-every 1 --eval-every 0 --max-steps 4 --embed-dim 8 --batch-size 8".split()]


def block_with(words):
    """The block of the page that has these words."""
    (block,) = [block for block in BLOCKS if words in block]
    return block


def edited(script, folder, *changes):
    """A fork in which each (old, new) of these is changed."""
    for old, new in changes:
        script = fork(script, folder, old, new)
    return script


def test_a_weighting_is_drawn_and_saved(tmp_path):
    module = block_with("class RunningMedian")
    make = block_with("weight_net = RunningMedian()")
    branch = block_with("return weight_net(sample_loss)")
    optimizer = "    optimizer = common.make_optimizer("
    otherwise = '    raise ValueError(f"--weighting '
    script = edited(
        mama, tmp_path,
        (FLAGS_RULER, f"\n{module}{FLAGS_RULER}"),
        (optimizer, make + optimizer),
        (otherwise, branch + otherwise),
        ('"l2rw", "none"]', '"l2rw", "median", "none"]'))
    flags = [*TINY, *"--weighting median --a0 2".split()]
    run_script(script, tmp_path / "run", *flags, pictures=True)
    assert (tmp_path / "run" / "weights.png").is_file()
    median = tensors_of(tmp_path / "run", 4)["weight_net/median"]
    assert median > 0 and median.isfinite()


def test_a_loss_touches_two_places(tmp_path):
    branch = (
        '        elif args.loss == "mine":\n'
        "            loss = clip_loss(image, text, 2 * tau_or_margin)\n")
    otherwise = (
        "        else:\n"
        '            raise ValueError(f"--loss {args.loss} has no branch in this loop")\n')
    choices = 'choices=["clip", "max-margin"'
    script = edited(
        mmts, tmp_path, (choices, f'{choices}, "mine"'), (otherwise, branch + otherwise))
    flags = [*TINY, *"--loss mine --num-clusters 4".split()]
    for row in few_steps(script, tmp_path / "run", *flags):
        assert row["loss"] > 0 and row["tau"] > 0


@pytest.mark.filterwarnings("error::UserWarning")  # such as of a scalar that has a gradient
def test_a_bias_of_a_loss_is_trained_and_saved(tmp_path):
    """SigLIP's, in a copy of ncl.py."""
    loss, bias = block_with("def sigmoid_loss"), block_with("temperature.bias = ")
    made = "    text_queue = QueryQueue(args.queue_size"
    otherwise = '        else:\n            raise ValueError(f"--loss'
    branch = block_with('elif args.loss == "siglip"')
    script = edited(
        ncl, tmp_path,
        (FLAGS_RULER, f"\n{loss}{FLAGS_RULER}"),
        (made, bias + made),
        (otherwise, branch + otherwise),
        ('["ncl", "infonce"]', '["ncl", "infonce", "siglip"]'))
    flags = [*TINY, *"--loss siglip --learnable-tau --tau 0.1 --normalize none".split()]
    run_script(script, tmp_path / "run", *flags)
    biases = [row["bias"] for row in steps(tmp_path / "run")]
    assert len(set(biases)) == 4
    assert all(-10.1 < bias < -9.9 for bias in biases)
    assert tensors_of(tmp_path / "run", 4)["tau/bias"] == biases[3]


def test_a_module_of_the_loss_has_a_rate_of_its_own(tmp_path):
    optimizer = "    optimizer = common.make_optimizer([model, temperature], args)\n"
    made = (
        "    net = torch.nn.Linear(8, 1)\n"
        "    common.scale_lr(net, 10.0)\n"
        "    optimizer = common.make_optimizer([model, temperature, net], args)\n")
    step = "\n        accelerator.backward(loss)"
    script = edited(
        mmts, tmp_path,
        (optimizer, made),
        (step, f"\n        loss = loss + net(image).mean(){step}"))
    flags = [*TINY, *"--num-clusters 4 --max-steps 2 --weight-decay 0.3".split()]
    log = few_steps(script, tmp_path / "run", *flags)
    state = torch.load(tmp_path / "run" / "checkpoints" / "step_2.pt", weights_only=True)
    rates = []
    for group in state["optimizer"]["param_groups"]:
        rates.append((round(group["lr"] / log[1]["lr"], 6), group["weight_decay"]))
    assert sorted(rates) == [(1, 0), (1, 0.3), (10, 0), (10, 0.3)]


def test_a_schedule_is_trained(tmp_path):
    schedule = inspect.getsource(mmts.base_temperature)
    script = fork(mmts, tmp_path, schedule, block_with("def base_temp"))
    flags = [*TINY, *"--num-clusters 4 --periods 1 --alpha 0.1".split()]
    for k, row in enumerate(few_steps(script, tmp_path / "run", *flags)):
        assert row["tau"] <= 0.17 - 0.025 * k + 1e-6


def test_a_backbone_and_a_data_set_are_trained_and_evaluated(tmp_path, monkeypatch):
    """From the folder of the pictures. The fork's name stands in what it leaves."""
    for split, n in (("train", 24), ("test", 8)):
        write_images(tmp_path / "pictures" / split, range(n))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(common.SETS, "mine", None)  # it goes with this test
    code = block_with("def mynet") + "\n\n" + block_with("def load_pictures")
    text = Path(temo.__file__).read_text(encoding="utf8")
    text = text.replace(FLAGS_RULER, f"\n{code}\n{FLAGS_RULER}", 1)
    imports = "from pathlib import Path\n\nimport torch.nn as nn\n"
    text = text.replace("import argparse\n", f"import argparse\n{imports}", 1)
    (tmp_path / "my_temo.py").write_text(text, encoding="utf8")
    script = importlib.import_module("my_temo")
    flags = (
        "--cpu --workers 0 --image-size 16 --batch-size 8 --max-steps 2 --eval-every 0 "
        "--dataset mine --image-encoder mynet --loss infonce --learnable-tau").split()
    summary = run_script(script, tmp_path / "a", *flags)
    assert summary["script"] == "my_temo"
    assert summary["test"]["mine"]["images"] == 8
    flags = "--import my_temo --checkpoint a --cpu --workers 0 --tasks retrieval".split()
    results = eval_py.main(eval_py.parse_args(flags))["datasets"]["mine"]["metrics"]
    assert results.items() <= summary["test"]["mine"].items()
    names = {}
    exec(block_with("load_file").replace("runs/NAME", "a"), names)
    assert names["own"].keys() == {"tau.log_tau"}


def test_an_encoder_that_is_not_used_is_frozen(tmp_path):
    made = "    optimizer = common.make_optimizer([model, temperature], args, args.eps)\n"
    script = fork(ncl, tmp_path, made, f"    model.text.requires_grad_(False)\n{made}")
    for name, size in (("whole", 0), ("chunks", 4)):
        few_steps(script, tmp_path / name, *TINY, "--chunk-size", size)
    assert losses(tmp_path / "chunks") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


class Pair(torch.nn.ModuleList):
    def forward(self, video, text):
        return self[0](video), self[1](text)


def test_the_loop_with_weights():
    """Of the page: the weight network learns, and its weights are in the encoders' loss."""
    torch.manual_seed(0)
    model = Pair([torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)])
    loader = [(torch.randn(6, 8), torch.randn(6, 8)) for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    names = dict(
        model=model, loader=loader, meta_loader=loader[::-1], lr=5e-6, tau=0.5,
        optimizer=optimizer)
    before = model[0].weight.clone()
    exec(block_with("weightnet_gradient"), names)
    assert not torch.equal(before, model[0].weight)
    sizes = names["gradient"][0].abs()
    assert 0 < sizes[sizes > 0].median() < 1e-7  # the page: 1e-8 to 1e-7
