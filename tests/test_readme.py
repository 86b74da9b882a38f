"""README and docs/: commands and code run or parse; what pages name exists."""

import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import common
from contrastive.data.table_files import USUAL_COLUMNS

import pytest
import torch

import eval as eval_py
import mama
import mmts
import ncl
import temo
import temperature_schedules
from variants import mama_qa, mmts_vast, ncl_ssb, sdclr, slip, temo_experts
from benchmarks import compare
from helpers import write_captions, write_images, write_rows, write_video
from tools import figures

ROOT = Path(__file__).resolve().parent.parent
METHODS = {
    "temo": temo,
    "temperature_schedules": temperature_schedules,
    "ncl": ncl,
    "mmts": mmts,
    "mama": mama}
VARIANTS = [mama_qa, mmts_vast, ncl_ssb, sdclr, slip, temo_experts]
PROGRAMS = {f"{name}.py": script for name, script in METHODS.items()}
PROGRAMS["eval.py"] = eval_py
PAGES = {}
for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
    PAGES[path] = path.read_text(encoding="utf8")
README = PAGES[ROOT / "README.md"]
TEXT = "\n".join(PAGES.values())
BLOCK = r"```.*?```"


# ------------------------------------------------------- commands --------------------------------
def commands_of(text):
    """The lines of a page's bash blocks, and its `commands` in the text.

    Without those that have variables of the shell or an ellipsis.
    """
    commands = []
    for block in re.findall(r"```bash\n(.*?)```", text, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            commands.append(line.split(" #")[0].strip())
    words = re.sub(BLOCK, "", text, flags=re.S)
    commands += re.findall(r"`((?:accelerate launch|torchrun|python)[^`]*)`", words)
    return [command for command in commands if not re.search(r"\$|\.\.\.", command)]


def commands_of_pages():
    """Commands of scripts and of tools, on all pages."""
    commands = set()
    for command in commands_of(TEXT):
        is_ours = re.search(r"\.py\b|^python -m", command)
        if is_ours and not re.search("pip|cp|mine|--help|--resume", command):
            commands.add(command)
    return commands


def commands_of_docstrings():
    """Commands at the top of the five scripts."""
    commands = set()
    for name, script in METHODS.items():
        for flags in re.findall(rf" {name}\.py ([^`\n#]*)", script.__doc__):
            if not re.search(r"\$|\\|\.\.\.|--help|--resume|\.py|'", flags):
                commands.add(f"python {name}.py {flags}")
    return commands


COMMANDS = commands_of_pages() | commands_of_docstrings()


@pytest.fixture
def place(tmp_path, monkeypatch, frozen_packages):
    """The working folder, with empty files and folders of the names in commands."""
    monkeypatch.chdir(tmp_path)
    for name in ("p.jsonl", *PROGRAMS):  # benchmarks.compare looks for its scripts
        Path(name).touch()
    folders = re.findall(r"\b[A-Z]{5,}\b", " ".join(COMMANDS))
    for name in {"photos", "videos", *folders}:
        Path(name).mkdir()


def parse_command(words):
    """Reads the flags of a command as its program does."""
    if words[1] != "-m":
        (place,) = [k for k, word in enumerate(words) if word in PROGRAMS]
        PROGRAMS[words[place]].parse_args(words[place + 1 :])
    elif words[2] == "benchmarks.compare":
        parse_comparison(words[3:])
    elif words[2] == "tools.figures":
        figures.parse_args(words[3:])
    else:
        assert importlib.util.find_spec(words[2]), words


def parse_comparison(flags):
    args = compare.parse_args(flags)
    if args.claims:
        return
    methods, _ = compare.claims_of(args)
    for method in methods:
        for script, *words in method.settings.values():
            PROGRAMS[script].parse_args([*words, f"--{args.vary}", "0"])


def test_commands_parse(place):
    assert len(COMMANDS) >= 100
    for command in COMMANDS:
        parse_command(shlex.split(command))


@pytest.fixture
def own_data(place):
    """The files of the README's commands for own data."""
    write_captions(Path(), 150)
    clean = common.load_data("captions.csv", "train").keys()  # of these nothing is held out
    Path("clean.txt").write_text("\n".join([*clean][:40]))
    for k in range(3):
        write_images(Path("photos", f"kind {k}"), range(k, 150, 3))
    rows = []
    for i in range(8):
        write_video(Path("videos", f"{i}.mp4"), range(40), fps=4)
        split = {0: "val", 1: "test"}.get(i, "train")
        for second in range(10):
            rows.append((f"{i}.mp4", f"clip {second} of {i}", second, second + 1, split))
    write_rows("clips.csv", ["video", "caption", "start", "end", "split"], rows)


def commands_for_own_data():
    """Without --recipe frozen, whose weights are packages that are not among the requirements."""
    pattern = r"accelerate launch \w+.py --dataset (captions.csv|photos|clips)"
    commands = []
    for command in commands_of(README):
        if re.match(pattern, command) and "frozen" not in command:
            commands.append(shlex.split(command))
    return commands


SHORT = ["--max-steps", "2", "--image-size", "16"]


def test_first_command_for_own_data_runs(own_data):
    """As it stands."""
    words = commands_for_own_data()[0]
    words[2] = str(ROOT / words[2])
    words[0] = str(Path(sys.executable).with_name(words[0]))
    result = subprocess.run([*words, *SHORT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "run folder:" in result.stdout


def test_other_commands_for_own_data_run(own_data):
    """In this process."""
    commands = commands_for_own_data()[1:]
    assert len(commands) >= 3
    for words in commands:
        script = PROGRAMS[words[2]]
        args = script.parse_args([*words[3:], *SHORT, "--workers", "0"])
        assert script.main(args)["steps"] == 2


# ------------------------------------------------------- code ------------------------------------
def code_with(words):
    """README's Python block that has these words."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    return next(block for block in blocks if words in block)


def test_ten_lines_in_someone_else_s_loop():
    net = torch.nn.Linear(8, 4)
    names = dict(
        torch=torch, image_encoder=net, text_encoder=net, total_steps=2,
        loader=[[torch.randn(6, 8) for _ in range(4)]] * 2,
        optimizer=torch.optim.SGD(net.parameters(), 0.1))
    before = net.weight.clone()
    exec(code_with("temo_loss"), names)
    assert not torch.equal(before, net.weight)


def test_the_fork_takes_the_place_of_its_function():
    names = {}
    exec(code_with("mine.py"), names)
    mine = names["modulated_temperature"]
    assert [*inspect.signature(mine).parameters] == [
        *inspect.signature(temo.modulated_temperature).parameters]
    temperatures = mine(torch.tensor([1.0, 0.0, -1.0]), 0.01, 0.04)
    assert temperatures.tolist() == pytest.approx([0.05, 0.02, 0.01])


# ------------------------------------------------------- what pages name --------------------------
def test_numbers_of_the_readme_are_those_of_the_results():
    """Each difference at its top stands in the tables of docs/results.md."""
    numbers = re.findall(r"[+-][\d.]+ ± [\d.]+", README.split("## Your data")[0])
    assert len(numbers) >= 7
    for number in numbers:
        assert f"| {number} |" in PAGES[ROOT / "docs" / "results.md"]


@pytest.mark.parametrize("page", METHODS)
def test_functions_of_the_equations_exist(page):
    text = PAGES[ROOT / "docs" / f"{page}.md"]
    section = text.partition("## Equations")[2].split("\n## ")[0]
    names = []
    for cell in re.findall(r"^\|[^|]*\|([^|]*)\|", section, re.M):
        names += re.findall(r"`(\w+)`", cell)
    assert len(names) >= 5
    for name in names:
        assert any(hasattr(module, name) for module in [METHODS[page], *VARIANTS]), name


def test_flags_exist():
    """Every --flag of the pages stands in a parser of ours, but for launchers' and Docker's."""
    flags = {"--help", "--multi_gpu", "--num_processes", "--nproc_per_node", "--shm-size"}
    for pattern in ("*.py", "*/*.py", "contrastive/*/*.py"):
        for path in ROOT.glob(pattern):
            flags.update(re.findall(r'"(--[a-z][\w-]*)"', path.read_text(encoding="utf8")))
    text = re.sub(r"```bash\n#SBATCH.*?```", "", TEXT, flags=re.S)
    for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", text):
        assert flag in flags or flag.replace("--no-", "--", 1) in flags, flag


def test_usual_names_of_columns_are_in_the_docs():
    for names in USUAL_COLUMNS.values():
        assert f"({', '.join(names)})" in PAGES[ROOT / "docs" / "data.md"]


def test_files_exist():
    """Those of links, and those that are named."""
    paths = []
    for page, text in PAGES.items():
        words = re.sub(BLOCK, "", text, flags=re.S)
        for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", words):
            paths.append(page.parent / link)
        for name in re.findall(r"`((?:contrastive|benchmarks|tools|tests|docs)/[\w/.-]+)`", words):
            paths.append(ROOT / name)
    assert len(paths) >= 30
    for path in paths:
        assert path.exists(), path
