"""docs/forking.md as it stands: a new weighting, rate, schedule, backbone and data set run, resume, and are what banner
and pictures say; its loop with weights."""

import importlib
import re
from pathlib import Path

import common
from contrastive.engine.checkpoints import checkpoints_of

import pytest
import torch

import eval as eval_py
import mama
import mmts
import ncl
import temo
from helpers import few_steps, fork, losses, refused, run_script, steps, write_images

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "forking.md").read_text(encoding="utf8"), re.S)
END = "\n# ======================================================= flags ==="  # of METHOD
PLACE = "    own.to(run.device)\n"
TINY = ("--cpu --workers 0 --image-size 16 --embed-dim 8 --frames 2 --batch-size 8 --clips 16 8 8 --log-every 1 "
        "--eval-every 0 --max-steps 4").split()
META = "--meta-batch-size 2 --meta-size 4".split()


def test_a_weighting_is_what_is_said_drawn_and_resumed(tmp_path, capsys):
    own = fork(mama, tmp_path, END, f"\n{BLOCKS[0]}\n{END}")
    own = fork(own, tmp_path, PLACE, f"{BLOCKS[1]}{PLACE}")
    run_script(own, tmp_path / "a", *TINY, *"--save-every 2 --weighting median --a0 2".split(), pictures=True)
    said = capsys.readouterr().out
    assert "weights median" in said and "meta-data" not in said and "METHOD" not in said
    assert (tmp_path / "a" / "weights.png").is_file() and {row["w"] for row in steps(tmp_path / "a")} != {1.0}
    whole = losses(tmp_path / "a")
    checkpoints_of(tmp_path / "a")[0].unlink()                             # as if killed after step 2 of 4
    (tmp_path / "a" / "summary.json").unlink()
    own.main(own.parse_args(["--resume", str(tmp_path / "a")]))
    assert losses(tmp_path / "a") == whole and len(whole) == 4


def test_a_part_of_own_with_a_rate_of_its_own(tmp_path):
    own = fork(mmts, tmp_path, PLACE, f'    own["net"] = nn.Linear(8, 1)\n{PLACE}')
    own = fork(own, tmp_path, "    learnt = [tower, own]\n", BLOCKS[4])
    own = fork(own, tmp_path, "    # <<< shared\n", f"    # <<< shared\n{BLOCKS[5]}")
    own = fork(own, tmp_path, "        run.check_finite",
               '        loss = loss + own["net"](image).mean()\n        run.check_finite')
    log = few_steps(own, tmp_path / "a", *TINY, *"--num-clusters 4 --max-steps 2 --weight-decay 0.3".split())
    state = torch.load(tmp_path / "a" / "checkpoints" / "step_2.pt", weights_only=True)
    rates, decays = ([group[key] for group in state["optimizer"]["param_groups"]] for key in ("lr", "weight_decay"))
    assert rates == pytest.approx([log[1]["lr"] * factor for factor in (1, 1, 10, 10)]) and decays == [0.3, 0, 0.3, 0]


def test_a_schedule_is_what_is_said_and_refused(tmp_path, capsys):
    own = fork(mmts, tmp_path, END, f"\n{BLOCKS[2]}\n{END}")
    log = few_steps(own, tmp_path / "a", *TINY, *"--num-clusters 4 --periods 1 --alpha 0.1".split())
    assert "tau 0.03 .. 0.17 over the run" in capsys.readouterr().out
    assert all(row["tau_max"] <= 0.17 - 0.025 * k + 1e-6 for k, row in enumerate(log))
    said = refused(own.parse_args, [*TINY, "--periods", "2", "--alpha", "0.08"], capsys)
    assert "the temperatures of the run, -0.04 .. 0.16, must be above 0" in said


def test_a_backbone_and_a_data_set_of_one_s_own_are_trained_and_evaluated(tmp_path, monkeypatch, capsys):
    """From the folder of the pictures. The fork's name stands in what it leaves, and temo.py does not go on with it."""
    for split, n in (("train", 24), ("test", 8)):
        write_images(tmp_path / "pictures" / split, range(n))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(common.SETS, "mine", None)                         # it goes with this test
    text = Path(temo.__file__).read_text(encoding="utf8").replace(END, f"\n{BLOCKS[3]}\n\n{BLOCKS[6]}\n{END}", 1)
    text = text.replace("import argparse\n", "import argparse\nfrom pathlib import Path\n\nimport timm\n", 1)
    (tmp_path / "my_temo.py").write_text(text, encoding="utf8")
    own = importlib.import_module("my_temo")
    flags = [*"--cpu --workers 0 --image-size 16 --embed-dim 8 --batch-size 8 --max-steps 2 --eval-every 0".split(),
             *"--dataset mine --image-encoder mynet --loss infonce --learnable-tau".split()]
    summary = run_script(own, tmp_path / "a", *flags)
    assert summary["script"] == "my_temo" and summary["test"]["mine"]["images"] == 8
    capsys.readouterr()                                                    # the run's bar
    said = refused(temo.parse_args, ["--resume", str(tmp_path / "a")], capsys)
    assert "a run of my_temo.py, not of temo.py" in said
    flags = "--import my_temo --checkpoint a --cpu --workers 0 --tasks retrieval".split()
    evaluated = eval_py.main(eval_py.parse_args(flags))["datasets"]["mine"]["metrics"]
    assert {k: summary["test"]["mine"][k] for k in evaluated} == evaluated
    names = {}
    exec(BLOCKS[7].replace("runs/NAME", "a"), names)
    assert names["own"].keys() == {"tau.log_tau"}


def test_an_encoder_that_is_not_used_is_frozen(tmp_path):
    frozen = fork(ncl, tmp_path, PLACE, f"    tower.text.requires_grad_(False)\n{PLACE}")
    whole, chunks = ([row["loss"] for row in few_steps(frozen, tmp_path / f"{n}", *TINY, "--chunk-size", n)]
                     for n in (0, 4))
    assert chunks == pytest.approx(whole, rel=1e-4)


def test_a_weighting_without_its_network_ends_the_run_at_once(tmp_path):
    line = "weight = WEIGHTINGS[args.weighting](sample.detach(), own, progress, args)"
    with pytest.raises(ValueError, match="its network has no part .* take --weighting none"):
        run_script(fork(mama, tmp_path, line, "weight = torch.ones_like(sample)"), tmp_path / "a", *TINY, *META)


def test_the_loop_with_weights():
    """Of the page: the weight network learns, and its weights are in the encoders' loss."""
    class Pair(torch.nn.ModuleList):
        def forward(self, video, text):
            return self[0](video), self[1](text)
    torch.manual_seed(0)
    model = Pair([torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)])
    loader = [(torch.randn(6, 8), torch.randn(6, 8)) for _ in range(3)]
    names = dict(model=model, loader=loader, meta_loader=loader[::-1], lr=5e-6, tau=0.5,
                 optimizer=torch.optim.SGD(model.parameters(), 0.1))
    before = model[0].weight.clone()
    code, = (block for block in BLOCKS if "weightnet_gradient" in block)
    exec(code, names)
    sizes = names["gradient"][0].abs()                                     # the page: 1e-8 to 1e-7
    assert not torch.equal(before, model[0].weight) and 0 < sizes[sizes > 0].median() < 1e-7
