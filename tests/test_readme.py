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
from torchvision.io import write_png

import eval as eval_py
import mama
import mmts
import ncl
import temo
import temperature_schedules
from benchmarks import compare, report
from helpers import write_video
from tools import figures as several

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"temo.py": temo, "temperature_schedules.py": temperature_schedules, "ncl.py": ncl,
           "mmts.py": mmts, "mama.py": mama}
NEED_DATA = {"cc3m", "cc12m", "msrvtt", "msrvtt-qa", "youcook2", "ssv2-lt", "epic-kitchens-100",
             "--resume"}  # the hub, or a run: the flags must parse
PAGES = {path: path.read_text(encoding="utf8") for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]}
README = PAGES[ROOT / "README.md"]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)
RUNS = re.compile(r"(?!python -m)(accelerate launch|python|torchrun)\b"
                  r".*\b(temo|temperature_schedules|ncl|mmts|mama)\.py")


def commands(text):
    """The lines of a page's bash blocks without those of a shell's own variables, and its `commands` in the text."""
    blocks = [body.replace("\\\n", " ") for body in re.findall(r"```bash\n(.*?)```", text, re.S)]
    lines = [line for body in blocks for line in body.splitlines() if "$" not in line]
    inline = re.findall(r"`((?:accelerate launch|torchrun|python)[^`]*)`", re.sub(r"```.*?```", "", text, flags=re.S))
    return [line.split(" #")[0].strip() for line in lines] + [c for c in inline if "..." not in c]


LINES = commands(README)
COMMANDS = [line for line in LINES if RUNS.match(line)]
ELSEWHERE = [line for text in PAGES.values() if text is not README for line in commands(text)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working folder with the files that the README's commands name."""
    folder = tmp_path_factory.mktemp("readme")
    rows = ["image,caption"]
    for i in range(300):
        write_png(torch.full((3, 16, 16), i % 250, dtype=torch.uint8), str(folder / f"{i}.png"))
        rows.append(f"{i}.png,picture number {i}")
    (folder / "captions.csv").write_text("\n".join(rows))
    clean = common.load_data(str(folder / "captions.csv"), "train").keys()  # of these nothing is held out
    (folder / "clean.txt").write_text("\n".join(list(clean)[:40]))
    for i in range(300):                                                   # a folder per class
        target = folder / "photos" / f"kind {i % 3}" / f"{i}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / f"{i}.png", target)
    rows = ["video,caption,start,end,split"]
    for i, split in enumerate(["train"] * 6 + ["val", "test"]):
        write_video(folder / "videos" / f"{i}.mp4", range(80), fps=4)
        rows += [f"{i}.mp4,clip {k} of video {i},{k},{k + 1},{split}" for k in range(20)]
    (folder / "clips.csv").write_text("\n".join(rows))
    (folder / "p.jsonl").write_text("")
    for name in ("ANNOTATIONS", "MOTION", "APPEARANCE", "VIDEOS", "FEATURES", "IMAGENET", "WEIGHTS"):
        (folder / name).mkdir()
    return folder


def test_there_are_commands():
    assert len(COMMANDS) >= 6 and COMMANDS[0].startswith(("accelerate launch temo.py", "python", "torchrun"))
    install = "pip install -r requirements.txt && "
    assert LINES[0] == install + "accelerate launch temo.py" and LINES[2] == install + "pytest"
    assert LINES[1].startswith("python -m benchmarks.compare ")            # the second thing to try


def test_papers_are_the_same_in_readme_citation_and_bibtex():
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf8").split("references:")[1]
    bibtex = re.findall(r"@\w+\{(.*?)\}\}\n", PAGES[ROOT / "docs" / "methods.md"].replace('{\\"o}', "ö"), re.S)
    papers = cited.split("  - type: ")[1:]
    assert len(papers) == len(bibtex) == 5
    for paper, entry in zip(papers, bibtex):
        title, *names = re.findall(r'(?:title|family-names|name): "([^"]+)"', paper)
        plain = re.sub(r"[{}]", "", entry)
        assert f"title = {title}," in plain and title in README
        for name in [name for name in names if not name[-1].isdigit()]:
            assert name in plain and name in README
        year = re.findall(r"year: (\d+)", paper)
        assert year == re.findall(r"year = (\d+)", plain.replace("{", "")) and (not year or year[0] in README)
        assert all(address in README for address in re.findall(r'url: "([^"]+)"', paper))


def test_numbers_of_the_shop_window_are_those_of_the_results():
    """Each difference with its interval at the top of the README stands in the tables of docs/results.md."""
    window, page = README.split("## Your data")[0], PAGES[report.PAGE]
    numbers = re.findall(r"[+-][\d.]+ ± [\d.]+", window)
    assert len(numbers) >= 7 and all(f"| {number} |" in page for number in numbers), numbers


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
    words += ["--max-steps", "2", "--image-size", "16"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(words, cwd=place, env=os.environ | {"PATH": path}, capture_output=True, text=True,
                            timeout=900)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
    assert "run folder:" in result.stdout and "(chance)" in result.stdout


def test_ten_lines_in_someone_else_s_loop():
    code = next(block for kind, block in BLOCKS if kind == "python" and "temo_loss" in block)
    net = torch.nn.Linear(8, 4)
    loader = [[torch.randn(6, 8) for _ in range(4)]] * 2
    names = dict(torch=torch, loader=loader, image_encoder=net, text_encoder=net, total_steps=2,
                 optimizer=torch.optim.SGD(net.parameters(), 0.1))
    before = net.weight.clone()
    exec(code, names)
    assert not torch.equal(before, net.weight)


def test_the_fork_takes_the_place_of_its_function():
    code, names = next(block for kind, block in BLOCKS if kind == "python" and "mine.py" in block), {}
    exec(code, names)
    mine = names["modulated_temperature"]
    assert list(inspect.signature(mine).parameters) == list(inspect.signature(temo.modulated_temperature).parameters)
    assert mine(torch.tensor([[1.0, 0.0, -1.0]]), 0.01, 0.04).tolist() == [pytest.approx([0.05, 0.02, 0.01])]


def test_commands_of_the_pages_parse(place, monkeypatch):
    monkeypatch.chdir(place)
    found = [c for c in ELSEWHERE if RUNS.match(c) and "--resume" not in c and "--help" not in c]
    for command in found:
        words = shlex.split(command)
        script = next(i for i, w in enumerate(words) if w in SCRIPTS)
        SCRIPTS[words[script]].parse_args(words[script + 1:])
    assert len(found) >= 10
    of_eval = [c for c in LINES + ELSEWHERE if c.startswith("python eval.py")]
    for command in of_eval:
        eval_py.parse_args(shlex.split(command)[2:])
    assert len(of_eval) >= 7
    programs = [c.split()[2] for c in ELSEWHERE if c.startswith("python -m")]
    assert len(programs) >= 8 and all(map(importlib.util.find_spec, programs))


def test_every_table_and_figure_has_its_command(place, monkeypatch):
    """One line of docs/methods.md each, whose commands parse; a tool's own parser has the last word."""
    monkeypatch.chdir(place)
    for name in SCRIPTS:
        Path(name).touch()                                                 # benchmarks.compare looks for its scripts
    text = PAGES[ROOT / "docs" / "methods.md"].partition("## Every table and figure")[2]
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    named, paper = {}, ""
    for item, command, printed, _ in ([cell.strip() for cell in line] for line in lines):
        if command == "command":
            paper = item
            continue
        for kind, numbers in re.findall(r"(Table|Fig)s?\.? (\d[\d, to]*)", item):
            for span in numbers.replace(" ", "").strip(",").split(","):
                first, _, last = span.partition("to")
                named.setdefault((paper, kind), set()).update(range(int(first), int(last or first) + 1))
        found = re.findall(r"`(python [^`]*)`", command)
        assert printed and (found or command == "none"), item
        for words in map(shlex.split, found):
            of_tool = words[2] if words[1] == "-m" else ""
            if words[1] in SCRIPTS:
                SCRIPTS[words[1]].parse_args(words[2:])
            elif words[1] == "eval.py":
                eval_py.parse_args(words[2:])
            elif of_tool == "benchmarks.compare":
                asked = compare.parse_args(words[3:])
                for script, *flags in (shlex.split(c) + asked.shared for c in asked.commands):
                    SCRIPTS[script].parse_args([*flags, f"--{asked.vary}", "0"])
            elif words[3:5] == ["clusters", "mmts.py"]:
                mmts.parse_args(words[5:])
            elif of_tool == "tools.figures":
                assert words[3] in several.FIGURES | several.SEVERAL and len(words) > 4, words
            else:
                assert importlib.util.find_spec(of_tool).name in ("tools.caption", "tools.paraphrase")
                source = Path(importlib.util.find_spec(of_tool).origin).read_text()
                assert all(f'"{flag}"' in source for flag in words if flag.startswith("--")), words
    last = {("TeMo", "Table"): 10, ("TeMo", "Fig"): 7, ("TS", "Table"): 10, ("TS", "Fig"): 5, ("MM-TS", "Table"): 12,
            ("MM-TS", "Fig"): 11, ("NCL", "Table"): 5, ("NCL", "Fig"): 8, ("MAMA", "Table"): 10, ("MAMA", "Fig"): 6}
    assert named == {key: {*range(1, n + 1)} for key, n in last.items()}


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_commands_of_a_script_s_own_page_parse(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = re.findall(rf" {name} ([^`\n#]*)", SCRIPTS[name].__doc__)
    found = {c for c in found if not re.search(r"\$|\\|\.\.\.|--help|--resume|\.py|'", c)}
    for command in found:
        for folder in re.findall(r"\b[A-Z]{5,}\b", command):
            Path(folder).mkdir(exist_ok=True)
        SCRIPTS[name].parse_args(shlex.split(command))
    assert found


def test_functions_of_the_equations_exist():
    modules = {"TeMo": temo, "TS": temperature_schedules, "MM-TS": mmts, "NCL": ncl, "MAMA": mama}
    rows = [line.split("|") for line in PAGES[ROOT / "docs" / "methods.md"].split("## Recipes")[0].splitlines()
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
    for folder in (checkout / ".ci", checkout / "runs", programs, place):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci" / "run")
    (checkout / "temo.py").touch()
    said = """echo "$(echo $(basename "$0") $*)|$(ls | tr '\\n' ' ')|$PWD" >> "$LOG"
[ "$(basename "$0")" != "$FAILING" ]
"""
    for name in ("pip", "accelerate", "pytest"):
        (programs / name).write_text("#!/bin/sh\n" + ("mkdir runs\n" if name == "accelerate" else "") + said)
    (programs / "python3").write_text(f'#!/bin/sh\nmkdir -p "$3/bin"\ncp "{programs}"/[ap]* "$3/bin"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    own = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "LOG": str(log), "TMPDIR": str(place)}
    done = subprocess.run([checkout / ".ci" / "run"], env=os.environ | own | {"FAILING": failing}, capture_output=True,
                          text=True)
    calls, files, folders = zip(*(line.split("|") for line in log.read_text().splitlines()))
    first, second = (LINES[k].split(" && ") for k in (0, 2))
    expected = [c.replace("install", "install -q") for c in first + second]
    assert list(calls) == (expected[:2] if failing == "accelerate" else expected), done.stderr
    assert len({*folders}) == 1 and str(place) in folders[0]
    assert files[0].split() == ["temo.py"] and files[-1].split() == ["runs", "temo.py"]
    assert (done.returncode == 0) == (not failing)
    assert bool(re.search("default command: [0-9]+ s", done.stdout)) == (len(calls) == 4)
    assert not any(place.iterdir()) and sorted(f.name for f in checkout.iterdir()) == [".ci", "runs", "temo.py"]
