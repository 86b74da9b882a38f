"""docs/forking.md as it stands: a new weighting and schedule run, resume, and are what banner and pictures say; a file
of one's own beside the scripts, its losses in somebody's own loop, and its errors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from contrastive import figures
from contrastive.engine.checkpoints import checkpoints_of
from contrastive.engine.processes import read_json
from contrastive.engine.run import Run

import pytest
import torch
from PIL import Image

import launch
import mama
import mmts
import ncl
import temo
from helpers import few_steps, fork, losses, refused, run_script, steps, write_images

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "forking.md").read_text(encoding="utf8"), re.S)
END = "\n# ======================================================= flags ==="  # of METHOD
TINY = ("--cpu --workers 0 --image-size 16 --embed-dim 8 --frames 2 --batch-size 8 --clips 16 8 8 --log-every 1 "
        "--eval-every 0 --max-steps 4").split()
MOVING = [*TINY, "--dataset", "moving-emoji"]
META = "--meta-batch-size 2 --meta-size 4".split()


def resumed_from_step_2(script, folder):
    """As if the run had been killed after step 2 of 4."""
    checkpoints_of(folder)[0].unlink()
    (folder / "summary.json").unlink()
    assert checkpoints_of(folder)[0].stem == "step_2"
    script.main(script.parse_args(["--resume", str(folder)]))


def test_a_weighting_is_what_is_said_drawn_and_resumed(tmp_path, capsys):
    own = fork(mama, tmp_path, END, f"\n{BLOCKS[0]}\n{END}")
    own = fork(own, tmp_path, "    own.to(run.device)\n", f"{BLOCKS[1]}    own.to(run.device)\n")
    run_script(own, tmp_path / "a", *TINY, *"--save-every 2 --weighting median --a0 2".split(), pictures=True)
    said = capsys.readouterr().out
    assert "weights median" in said and "meta-data" not in said and "METHOD" not in said
    assert (tmp_path / "a" / "weights.png").is_file() and {row["w"] for row in steps(tmp_path / "a")} != {1.0}
    whole = losses(tmp_path / "a")
    resumed_from_step_2(own, tmp_path / "a")
    assert losses(tmp_path / "a") == whole


def test_a_part_of_own_with_a_rate_of_its_own(tmp_path):
    own = fork(mmts, tmp_path, "    own.to(run.device)\n", """    own["net"] = nn.Linear(8, 1)
    own.to(run.device)\n""")
    own = fork(own, tmp_path, "    learnt = [tower, own]\n", BLOCKS[4])
    own = fork(own, tmp_path, "    # <<< shared\n    model, optimizer", f"""    # <<< shared
{BLOCKS[5]}    model, optimizer""")
    own = fork(own, tmp_path, "        run.check_finite", """        loss = loss + own["net"](image).mean()
        run.rates = [group["lr"] / run.lr for group in optimizer.param_groups]
        run.moved = [p.detach().clone() for p in own["net"].parameters()]
        run.check_finite""")
    seen, done, wrap = [], Run.done, Run.wrap

    def decays(run, trained, own, optimizer, second=None):
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0, 0.3, 0]
        return wrap(run, trained, own, optimizer, second)
    own.Run = type("Watched", (Run,), {"wrap": decays, "done": lambda run, *args: (
        seen.append((run.rates, [(p - q).abs().max().item() for p, q in zip(run.own["net"].parameters(), run.moved)])),
        done(run, *args))})
    flags = "--num-clusters 4 --warmup-epochs 0 --save-every 2 --weight-decay 0.3".split()
    run_script(own, tmp_path / "a", *MOVING, *flags)
    assert all(rates == [1, 1, 10, 10] and min(moved) > 0 for rates, moved in seen) and len(seen) == 4
    resumed_from_step_2(own, tmp_path / "a")
    assert seen[4:] == seen[2:4]


def test_a_schedule_is_what_is_said_and_refused(tmp_path, capsys):
    own = fork(mmts, tmp_path, END, f"\n{BLOCKS[2]}\n{END}")
    log = few_steps(own, tmp_path / "a", *TINY, *"--num-clusters 4 --periods 1 --alpha 0.1".split())
    assert "tau 0.03 .. 0.17 over the run" in capsys.readouterr().out
    assert all(row["tau_max"] <= 0.17 - 0.025 * k + 1e-6 for k, row in enumerate(log))
    said = refused(own.parse_args, [*TINY, "--periods", "2", "--alpha", "0.08"], capsys)
    assert "the temperatures of the run, -0.04 .. 0.16, must be above 0" in said


def test_a_backbone_and_a_data_set_of_one_s_own_are_trained_and_evaluated(tmp_path, monkeypatch, capsys):
    """As a user does it: mine.py, then eval.py in a process of its own, from the folder of the pictures. Its name
    stands in what it leaves, and temo.py does not go on with it."""
    for split, n in (("train", 24), ("test", 8)):
        write_images(tmp_path / "pictures" / split, range(n))
    text = Path(temo.__file__).read_text(encoding="utf8")
    for old, new in (("import argparse\n", "import argparse\nfrom pathlib import Path\n\nimport timm\n"),
                     (END, f"\n{BLOCKS[3]}\n\n{BLOCKS[6]}\n{END}")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "mine.py").write_text(text, encoding="utf8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    flags = [*"--cpu --workers 0 --image-size 16 --embed-dim 8 --batch-size 8 --max-steps 2 --eval-every 0".split(),
             *"--log-every 1 --dataset mine --image-encoder mynet --loss infonce --learnable-tau".split()]
    launch.finish(tmp_path / "mine.py", [*flags, "--output-dir", tmp_path, "--run-name", "a"], tmp_path / "log")
    assert {read_json(tmp_path / "a" / file)["script"] for file in ("args.json", "summary.json")} == {"mine"}
    assert (tmp_path / "log").read_text().startswith("mine.py\n")
    assert "a run of mine.py, not of temo.py" in refused(temo.parse_args, ["--resume", str(tmp_path / "a")], capsys)
    command = [sys.executable, ROOT / "eval.py", "--import", "mine", "--checkpoint", "a", "--cpu", "--workers", "0"]
    done = subprocess.run([*command, "--tasks", "retrieval"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    evaluated = json.loads((tmp_path / "a" / "eval" / "eval.json").read_text())["datasets"]["mine"]["metrics"]
    trained = read_json(tmp_path / "a" / "summary.json")["test"]["mine"]
    assert evaluated["images"] == 8 and {k: trained[k] for k in evaluated} == evaluated
    names = {}
    exec(BLOCKS[7].replace("runs/NAME", "a"), names)
    assert names["own"].keys() == {"tau.log_tau"}


def test_an_encoder_that_is_not_used_is_frozen(tmp_path):
    place = "    own.to(run.device)\n"
    frozen = fork(ncl, tmp_path, place, f"    tower.text.requires_grad_(False)\n{place}")
    whole, chunks = ([row["loss"] for row in few_steps(frozen, tmp_path / f"{n}", *MOVING, "--chunk-size", n)]
                     for n in (0, 4))
    assert chunks == pytest.approx(whole, rel=1e-4)


FAULTS = {  # a fork's line, what it says instead, the error
    '    queues = ()\n': ("    queues = torch.zeros(2) @ torch.zeros(3)\n", RuntimeError, "inconsistent tensor size"),
    "weight = WEIGHTINGS[args.weighting](sample.detach(), own, progress, args)":
        ("weight = torch.ones_like(sample).detach()", ValueError, "its network has no part .* take --weighting none")}


@pytest.mark.parametrize("line", FAULTS)
def test_a_fault_of_a_fork_ends_its_run_at_once(line, tmp_path):
    now, error, words = FAULTS[line]
    script, flags = (ncl, []) if "queues" in line else (mama, META)
    with pytest.raises(error, match=words):
        run_script(fork(script, tmp_path, line, now), tmp_path / "a", *MOVING, *flags)


def test_what_banner_and_bar_say_of_a_loss(tmp_path, capsys):
    """Nothing where a fork has no random_guess; MAMA's loss without its weights."""
    own = fork(temo, tmp_path, "\nif __name__ ==", "\nrandom_guess = lambda *_: None\nif __name__ ==")
    few_steps(own, tmp_path / "a", *MOVING)
    said = capsys.readouterr().out
    assert "batch  " in said and "negatives" not in said and "random guess" not in said
    log = few_steps(mama, tmp_path / "b", *MOVING, *META)
    said = capsys.readouterr()
    shown = re.findall(r" L=([\d.]+)", said.err)
    assert shown and shown[-1] == f"{log[-1]['L']:.3f}" != f"{log[-1]['loss']:.3f}" and " loss=" not in said.err
    assert "random guess L " in said.out
    few_steps(mmts, tmp_path / "c", *MOVING, "--num-clusters", 4, "--loss", "max-margin")
    assert " margin=" in (said := capsys.readouterr().err) and " tau=" not in said


# ---------------------------------------------------- in somebody's own loop ---------------------------------------
def test_the_loop_with_weights():
    """The weight network learns, and its weights are in the encoders' loss."""
    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.video, self.text = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)

        def forward(self, video, text):
            return self.video(video), self.text(text)
    torch.manual_seed(0)
    model, loader = Pair(), [(torch.randn(6, 8), torch.randn(6, 8)) for _ in range(3)]
    names = dict(model=model, loader=loader, meta_loader=loader[::-1], lr=5e-6, tau=0.5,
                 optimizer=torch.optim.SGD(model.parameters(), 0.1))
    before = model.video.weight.clone()
    code, = (block for block in BLOCKS if "weightnet_gradient" in block)
    exec(code, names)
    sizes = names["gradient"][0].abs()                                     # the page: 1e-8 to 1e-7
    assert not torch.equal(before, model.video.weight) and 0 < sizes[sizes > 0].median() < 1e-7


TRAIN = """
import torch
import utils
from my_data import Pairs
from mycode import common
from temo import temo_loss
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Pairs(), 4, num_workers=1, multiprocessing_context="spawn")
    print([temo_loss(x, y, x, y, 0.5).isfinite().item() for x, y in loader], utils.OURS, common.OURS)
"""
DATA = """
import torch
import temo                                                # a spawned worker finds the clone as well
class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.randn(4), temo.modulated_temperature(torch.rand(4))
"""


def test_from_another_folder_beside_its_own_files(tmp_path):
    """Modules, folders and a package of the user's, and spawned workers; a common.py of theirs is named."""
    def python(*words):
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
                              capture_output=True, text=True, timeout=300)
        return (done.stdout + done.stderr).strip()
    for name, text in {"train.py": TRAIN, "my_data.py": DATA, "utils.py": "OURS = 1", "tools/notes.py": "",
                       "mycode/common.py": "OURS = 2", "mycode/__init__.py": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert python("train.py") == "[True, True] 1 2"
    (tmp_path / "common.py").write_text("OURS = 2")
    said = python("-c", "from temo import temo_loss").splitlines()[-1]
    assert re.fullmatch(r"ImportError: cannot import name '\w+' from 'common' \(.*common\.py\)", said)


# ---------------------------------------------------- pictures -------------------------------------------------------
def test_letters_have_one_size_and_a_legend_covers_nothing(tmp_path):
    fig, axes = figures.base.figure(2)
    for ax in axes:
        for k in range(4):
            ax.plot([0, 1, 2], [k, k + 5, 9], label=f"a name for a line{k}")
        ax.set(title="title", xlabel="x")
        figures.base.legend_above(ax)
    figures.base.save_figure(fig, tmp_path / "a.png")
    for ax in axes:
        legend, top = ax.get_legend().get_window_extent(), ax.transData.transform((0, 9))[1]
        assert top < legend.y0 + 3 and legend.width < ax.bbox.width + 3    # in pixels
        texts = [ax.title, ax.xaxis.label, *ax.get_xticklabels(), *ax.get_legend().get_texts()]
        assert {text.get_fontsize() for text in texts} == {figures.base.LETTERS}
    assert Image.open(tmp_path / "a.png").size == tuple(int(200 * x) for x in fig.get_size_inches())
