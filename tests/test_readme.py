"""The README's commands and code run as they stand (two steps); its numbers come from files."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchvision.io import write_png

import eval as evaluation
import ncl
import temo
import temperature_schedules

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"temo.py": temo, "temperature_schedules.py": temperature_schedules, "ncl.py": ncl}
NEED_DATA = {"cc3m", "cc12m", "msrvtt", "--write-paraphrases", "--resume"}  # the hub, or a run: the flags must parse
README = (ROOT / "README.md").read_text(encoding="utf8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)
COMMANDS = [line.split("#")[0].strip() for kind, block in BLOCKS if kind == "bash" for line in block.splitlines()
            if "$" not in line and re.match(r"(accelerate launch|python|torchrun)\b.*\b(temo|temperature_schedules|ncl)\.py", line)] + [c for c in re.findall(r"`((?:torchrun|python)[^`]*temo\.py[^`]*)`", README) if "..." not in c]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working folder with the files that the README's commands name."""
    folder = tmp_path_factory.mktemp("readme")
    rows = ["image,caption"]
    for i in range(300):
        write_png(torch.full((3, 16, 16), i % 250, dtype=torch.uint8), str(folder / f"{i}.png"))
        rows.append(f"{i}.png,picture number {i}")
    (folder / "captions.csv").write_text("\n".join(rows))
    return folder


def environment():
    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}


def test_there_are_commands():
    assert len(COMMANDS) >= 6 and COMMANDS[0].startswith(("accelerate launch temo.py", "python", "torchrun"))
    first = [line for kind, block in BLOCKS if kind == "bash" for line in block.splitlines()][:2]
    assert first == ["pip install -r requirements.txt && accelerate launch temo.py", "pip install -r requirements.txt && pytest"]


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_command(command, place):
    words = shlex.split(command)
    script = next(i for i, w in enumerate(words) if w in SCRIPTS)
    module = SCRIPTS[words[script]]
    if NEED_DATA & set(words):
        arguments = [w.replace("ANNOTATIONS", ".").replace("VIDEOS", ".") for w in words[script + 1:] if w != "--help"]
        if "--resume" not in words:
            module.parse_args(arguments)
        return
    words[script] = str(ROOT / words[script])
    words += ["--max-steps", "2", "--eval-batch", "512"]
    result = subprocess.run(words, cwd=place, env=environment(), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
    assert "run folder:" in result.stdout and "(chance)" in result.stdout


def test_help_shows_the_recipe():
    text = subprocess.run([sys.executable, "temo.py", "--dataset", "cc3m", "--help"], cwd=ROOT, env=environment(), capture_output=True, text=True).stdout
    assert re.search(r"\(default:\s+2048\)", text) and "--tau-alpha" in text


def test_ten_lines_in_someone_else_s_loop():
    code = next(block for kind, block in BLOCKS if kind == "python" and "temo_loss" in block)
    net = torch.nn.Linear(8, 4)
    names = dict(loader=[[torch.randn(6, 8) for _ in range(4)]] * 2, image_encoder=net, text_encoder=net, optimizer=torch.optim.SGD(net.parameters(), 0.1), total_steps=2)
    before = net.weight.clone()
    exec(code, names)
    assert not torch.equal(before, net.weight)


def test_reading_guide_names_exist():
    for part, module in zip(README.split("## Reading guide: ")[1:], (temo, temperature_schedules, ncl)):
        names = [n for line in part.split("\n#")[0].splitlines() if line.startswith("|") for n in re.findall(r"`(\w+)`", line.split("|")[2])]
        assert len(names) >= 5 and all(hasattr(module, n) for n in names), names


def test_eval_commands_parse():
    commands = [line.split("#")[0] for kind, block in BLOCKS if kind == "bash" for line in block.splitlines() if line.startswith("python eval.py")]
    assert len(commands) >= 5
    for command in commands:
        evaluation.parse_args(shlex.split(command)[2:])


def test_readme_says_nothing_of_where_it_was_made():
    for path in [p for p in ROOT.rglob("*") if p.suffix in (".py", ".md", ".toml", ".cff", ".txt") and "runs" not in p.parts and ".git" not in p.parts]:
        text = path.read_text(encoding="utf8", errors="ignore")
        assert not re.search(r"(?<![\w.])/(tmp|home|root|mnt)/\w", text), path
