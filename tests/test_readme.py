"""The README and the pages of docs/: its commands and code run as they stand (two steps), theirs parse; names, flags
and links exist; tables come from files."""

import importlib.util
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import common

import pytest
import torch

import eval as eval_py
import mama
import mmts
import ncl
import temo
import temperature_schedules
from benchmarks import compare, report
from helpers import write_captions, write_images, write_rows, write_video
from tools import figures as several

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"temo.py": temo, "temperature_schedules.py": temperature_schedules, "ncl.py": ncl,
           "mmts.py": mmts, "mama.py": mama, "eval.py": eval_py}
PAGES = {path: path.read_text(encoding="utf8") for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]}
README, METHODS = PAGES[ROOT / "README.md"], PAGES[ROOT / "docs" / "methods.md"]
CODE = re.findall(r"```python\n(.*?)```", README, re.S)


def commands(text):
    """The lines of a page's bash blocks without those of a shell's own variables, and its `commands` in the text."""
    blocks = [body.replace("\\\n", " ") for body in re.findall(r"```bash\n(.*?)```", text, re.S)]
    lines = [line for body in blocks for line in body.splitlines() if "$" not in line]
    inline = re.findall(r"`((?:accelerate launch|torchrun|python)[^`]*)`", re.sub(r"```.*?```", "", text, flags=re.S))
    return [line.split(" #")[0].strip() for line in lines] + [c for c in inline if "..." not in c]


LINES = commands(README)
RUN_HERE = [line for line in LINES if re.match(r"accelerate launch \w+\.py --dataset (captions.csv|photos|clips.csv)",
                                               line)]
OF_SCRIPTS = {c for text in PAGES.values() for c in commands(text) for name in SCRIPTS
              if name in c and not re.search("pip|cp|mine|--help|--resume", c)}
OF_TOOLS = {c for text in PAGES.values() for c in commands(text) if c.startswith("python -m")}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working folder with the files that the README's commands name."""
    folder = tmp_path_factory.mktemp("readme")
    write_captions(folder, 300)
    clean = common.load_data(str(folder / "captions.csv"), "train").keys()  # of these nothing is held out
    (folder / "clean.txt").write_text("\n".join([*clean][:40]))
    for k in range(3):
        write_images(folder / "photos" / f"kind {k}", range(k, 300, 3))
    rows = [(f"{i}.mp4", f"clip {k} of video {i}", k, k + 1, ("val", "test")[i] if i < 2 else "train")
            for i in range(8) for k in range(20)]
    write_rows(folder / "clips.csv", ["video", "caption", "start", "end", "split"], rows)
    for i in range(8):
        write_video(folder / "videos" / f"{i}.mp4", range(80), fps=4)
    (folder / "p.jsonl").touch()
    for name in ("ANNOTATIONS", "MOTION", "APPEARANCE", "VIDEOS", "FEATURES", "IMAGENET", "WEIGHTS"):
        (folder / name).mkdir()
    return folder


def parse(words):
    """The flags of a command as its program reads them; of a tool without a parser of its own, that it has them."""
    if words[1] != "-m":
        at = next(k for k, word in enumerate(words) if word in SCRIPTS)
        return SCRIPTS[words[at]].parse_args(words[at + 1:])
    program, flags = words[2], words[3:]
    if program == "benchmarks.compare":
        asked = compare.parse_args(flags)
        for script, *more in (shlex.split(c) + asked.shared for c in asked.commands):
            SCRIPTS[script].parse_args([*more, f"--{asked.vary}", "0"])
    elif flags[:2] == ["clusters", "mmts.py"]:
        mmts.parse_args(flags[2:])
    elif program == "tools.figures":
        assert not flags or flags[0] in several.FIGURES | several.SEVERAL and len(flags) > 1, words
    else:
        source = Path(importlib.util.find_spec(program).origin).read_text(encoding="utf8")
        assert all(f'"{flag}"' in source for flag in flags if flag.startswith("--")), words


# ------------------------------------------------------- commands ----------------------------------------------------
def test_the_first_commands():
    install = "pip install -r requirements.txt && "
    assert LINES[0] == install + "accelerate launch temo.py" and LINES[2] == install + "pytest"
    assert LINES[1].startswith("python -m benchmarks.compare ")            # the second thing to try
    assert len(RUN_HERE) >= 4


@pytest.mark.parametrize("command", RUN_HERE)
def test_command(command, place):
    words = shlex.split(command)
    words[2] = str(ROOT / words[2])
    words += ["--max-steps", "2", "--image-size", "16"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(words, cwd=place, env=os.environ | {"PATH": path}, capture_output=True, text=True,
                            timeout=900)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
    assert "run folder:" in result.stdout and "(chance)" in result.stdout


def test_commands_of_the_pages_parse(place, monkeypatch):
    monkeypatch.chdir(place)
    for name in SCRIPTS:
        Path(name).touch()                                                 # benchmarks.compare looks for its scripts
    assert len(OF_SCRIPTS) >= 60 and len(OF_TOOLS) >= 20
    for command in OF_SCRIPTS | OF_TOOLS:
        parse(shlex.split(command))


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "eval.py"])
def test_commands_of_a_script_s_own_page_parse(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = re.findall(rf" {name} ([^`\n#]*)", SCRIPTS[name].__doc__)
    found = {c for c in found if not re.search(r"\$|\\|\.\.\.|--help|--resume|\.py|'", c)}
    for command in found:
        for folder in re.findall(r"\b[A-Z]{5,}\b", command):
            Path(folder).mkdir(exist_ok=True)
        SCRIPTS[name].parse_args(shlex.split(command))
    assert found


def test_every_table_and_figure_has_its_command():
    """One line of docs/methods.md each."""
    lines = [line.strip("|").split("|") for line in METHODS.partition("## Every table and figure")[2].splitlines()
             if line.startswith("| ")]
    named, paper = {}, ""
    for item, command, printed, _ in ([cell.strip() for cell in line] for line in lines):
        if command == "command":
            paper = item
            continue
        assert printed and ("`python " in command or command == "none"), item
        for kind, numbers in re.findall(r"(Table|Fig)s?\.? (\d[\d, to]*)", item):
            for span in numbers.replace(" ", "").strip(",").split(","):
                first, _, last = span.partition("to")
                named.setdefault((paper, kind), set()).update(range(int(first), int(last or first) + 1))
    last = {("TeMo", "Table"): 10, ("TeMo", "Fig"): 7, ("TS", "Table"): 10, ("TS", "Fig"): 5, ("MM-TS", "Table"): 12,
            ("MM-TS", "Fig"): 11, ("NCL", "Table"): 5, ("NCL", "Fig"): 8, ("MAMA", "Table"): 10, ("MAMA", "Fig"): 6}
    assert named == {key: {*range(1, n + 1)} for key, n in last.items()}


def test_ten_lines_in_someone_else_s_loop():
    code = next(block for block in CODE if "temo_loss" in block)
    net = torch.nn.Linear(8, 4)
    loader = [[torch.randn(6, 8) for _ in range(4)]] * 2
    names = dict(torch=torch, loader=loader, image_encoder=net, text_encoder=net, total_steps=2,
                 optimizer=torch.optim.SGD(net.parameters(), 0.1))
    before = net.weight.clone()
    exec(code, names)
    assert not torch.equal(before, net.weight)


def test_the_fork_takes_the_place_of_its_function():
    code, names = next(block for block in CODE if "mine.py" in block), {}
    exec(code, names)
    mine = names["modulated_temperature"]
    assert list(inspect.signature(mine).parameters) == list(inspect.signature(temo.modulated_temperature).parameters)
    assert mine(torch.tensor([[1.0, 0.0, -1.0]]), 0.01, 0.04).tolist() == [pytest.approx([0.05, 0.02, 0.01])]


# ------------------------------------------------------- words -------------------------------------------------------
def test_papers_are_the_same_in_readme_citation_and_bibtex():
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf8").split("references:")[1]
    bibtex = re.findall(r"@\w+\{(.*?)\}\}\n", METHODS.replace('{\\"o}', "ö"), re.S)
    papers = cited.split("  - type: ")[1:]
    assert len(papers) == len(bibtex) == 5
    for paper, entry in zip(papers, bibtex):
        said = re.findall(r'(?:title|family-names|name): "([^"]*[^"\d])"', paper) + re.findall(r"year: (\d+)", paper)
        plain = re.sub(r"[{}]", "", entry)
        assert len(said) >= 2 and not [x for x in said if x not in plain or x not in README], said


def test_numbers_of_the_shop_window_are_those_of_the_results():
    """Each difference with its interval at the top of the README stands in the tables of docs/results.md."""
    numbers = re.findall(r"[+-][\d.]+ ± [\d.]+", README.split("## Your data")[0])
    assert len(numbers) >= 7 and all(f"| {number} |" in PAGES[report.PAGE] for number in numbers), numbers


def test_functions_of_the_equations_exist():
    modules = {"TeMo": temo, "TS": temperature_schedules, "MM-TS": mmts, "NCL": ncl, "MAMA": mama}
    rows = [line.split("|") for line in METHODS.split("## Recipes")[0].splitlines()
            if line.startswith("|")][2:]
    names = [(row[1].split()[0].rstrip(","), name) for row in rows for name in re.findall(r"`(\w+)`", row[2])]
    assert {paper for paper, _ in names} == set(modules) and len(names) >= 30
    unknown = [(paper, name) for paper, name in names if not hasattr(modules[paper], name)]
    assert not unknown, unknown


def test_flags_exist():
    """Every --flag of the pages stands in a parser of ours, but for those of the launchers."""
    text = re.sub(r"```bash\n#SBATCH.*?```", "", "\n".join(PAGES.values()), flags=re.S)
    sources = "".join(p.read_text(encoding="utf8") for p in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py"),
                                                                 *ROOT.glob("contrastive/*/*.py")])
    others = {"--multi_gpu", "--num_processes", "--nproc_per_node", "--shm-size"}  # of the launchers, of Docker
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) - others
    known = set(re.findall(r'"(--[a-z][\w-]*)"', sources)) | {"--help"}
    unknown = [flag for flag in named if not {flag, flag.replace("--no-", "--", 1)} & known]
    assert len(named) >= 80 and not unknown, unknown


def test_links_exist():
    words = {page: re.sub(r"```.*?```", "", text, flags=re.S) for page, text in PAGES.items()}
    links = [(page, link) for page, text in words.items() for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text)]
    assert len(links) >= 20
    missing = [(page.name, link) for page, link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing, missing


def test_the_readme_is_short():
    assert len(README.split()) <= 1300 and len(README.splitlines()) <= 160


def test_the_pages_are_short():
    """Words of docs/ outside of code blocks and tables."""
    pages = [re.sub(r"```.*?```", "", text, flags=re.S) for path, text in PAGES.items() if path.parent.name == "docs"]
    lines = [line for text in pages for line in text.splitlines() if not line.startswith(("|", "<!--"))]
    assert len(pages) == 5 and 5000 < sum(len(line.split()) for line in lines) <= 6500


def test_tables_are_those_of_the_results_files(capsys):
    report.main(["--check"])
    page = PAGES[report.PAGE]
    assert len(report.BLOCK.findall(page)) == 4 and "<!-- results" not in README
    assert report.filled(page.replace("| InfoNCE ", "| better ")) == page  # a number typed by hand does not stay


def test_readme_says_nothing_of_where_it_was_made():
    kinds, out = (".py", ".md", ".toml", ".cff", ".txt"), {"runs", ".git", "venv", ".venv"}
    for path in [p for p in ROOT.rglob("*") if p.suffix in kinds and not out & set(p.parts)]:
        text = path.read_text(encoding="utf8", errors="ignore")
        assert not re.search(r"(?<![\w.])/(tmp|home|root|mnt)/\w", text), path


@pytest.mark.parametrize("failing", ["", "accelerate", "pytest"])
def test_ci_runs_the_two_commands_in_one_copy(failing, tmp_path):
    """.ci/run, with programs in place of the real ones that only say where they are called: the README's commands in
    its order, in one copy of the checkout and one environment; what fails is its exit code, and nothing is left."""
    checkout, programs, place, log = (tmp_path / name for name in ("a check out", "programs", "place", "log"))
    for folder in (checkout / ".ci", programs, place):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci" / "run")
    said = '#!/bin/sh\necho "$(basename "$0") $*|$PWD" >> "$LOG"\n[ "$(basename "$0")" != "$FAILING" ]\n'
    for name in ("pip", "accelerate", "pytest"):
        (programs / name).write_text(said)
    (programs / "python3").write_text(f'#!/bin/sh\nmkdir -p "$3/bin"\ncp "{programs}"/[ap]* "$3/bin"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    own = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "LOG": str(log), "TMPDIR": str(place)}
    done = subprocess.run([checkout / ".ci" / "run"], env=os.environ | own | {"FAILING": failing}, capture_output=True)
    calls, folders = zip(*(line.split("|") for line in log.read_text().splitlines()))
    expected = [c.replace("install", "install -q") for k in (0, 2) for c in LINES[k].split(" && ")]
    assert [c.strip() for c in calls] == (expected[:2] if failing == "accelerate" else expected), done.stderr
    assert len({*folders}) == 1 and str(place) in folders[0] and (done.returncode == 0) == (not failing)
    assert not any(place.iterdir()) and [f.name for f in checkout.iterdir()] == [".ci"]
