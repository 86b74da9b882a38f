"""The scripts stay siblings: shared blocks are identical, no flag is dead, METHOD comes first, lines stay narrow."""

import argparse
import ast
import importlib
import itertools
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import common
from contrastive.engine import flags

import pytest
import torch

import mama
import mmts
import ncl
import temo
import temperature_schedules as ts
from helpers import refused, unit

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("temperature_schedules", "mmts", "ncl", "mama", "temo")
SCRIPTS = [ROOT / f"{n}.py" for n in NAMES if (ROOT / f"{n}.py").exists()]
HOUSE = ("engine", "encoders", "data", "evaluation", "figures", "tools")
ROOMS = [f for room in HOUSE for f in (ROOT / ("" if room == "tools" else "contrastive") / room).glob("*.py")]
FILES = ("*.py", "contrastive/*.py", "contrastive/*/*.py", "tools/*.py", "benchmarks/*.py", "tests/*.py")
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)


def blocks(path):
    return dict(re.findall(r"# >>> shared: (\w+)\n(.*?)# <<< shared", path.read_text(encoding="utf8"), re.S))


def imports(path):
    """Modules that a file imports at any place: {name: is it at the top level?}."""
    tree, found = ast.parse(path.read_text(encoding="utf8")), {}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{a.name}" for a in node.names] + [node.module]
        for name in names:
            found[name.split(".")[0]] = found.get(name.split(".")[0], False) or node in tree.body
    return found


@each_script
def test_shared_blocks(script):
    text = script.read_text(encoding="utf8")
    marks = [len(re.findall(rf"^ *# {mark} shared", text, re.M)) for mark in (">>>", "<<<")]
    assert marks == [len(blocks(script))] * 2
    assert blocks(script) == blocks(ROOT / "temo.py") and "optimizer" in blocks(script)


def flags_of(path):
    """{dest: flag} of every add_argument in a file, and of the flags that a data set declares."""
    out = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        flags = []
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("add_argument", "add"):
            flags = node.args[:1]
        elif isinstance(node, ast.Dict):
            flags = node.keys
        for flag in flags:
            if isinstance(flag, ast.Constant) and str(flag.value).startswith("--"):
                out[flag.value[2:].replace("-", "_")] = flag.value
    return out


@each_script
def test_every_flag_has_an_effect(script):
    """Each dest is read as args.NAME, or by name: in the script, in a room that has no flags of its own, or as an
    option of load_data in data/."""
    files = [p for p in [script, ROOT / "common.py", *ROOMS] if p.parent != ROOT / "tools"]
    texts = {p: p.read_text(encoding="utf8") for p in files}
    shared, opened = ROOT / "contrastive" / "engine" / "flags.py", ROOT / "contrastive" / "data" / "__init__.py"
    before, _, after = texts[shared].partition("    def _add_shared")
    texts[shared] = before
    texts[opened] = re.sub(r"[A-Z]+_FLAGS = \(.*?\)", "", texts[opened], flags=re.S)
    read = {name for pair in re.findall(r'\bargs\.(\w+)|"(\w+)"', "".join(texts.values())) for name in pair}
    flags = flags_of(script) | flags_of(shared)
    for room in (ROOT / "contrastive" / "data").glob("*.py"):
        flags |= flags_of(room)
    assert {"dataset", "lr", "clips", "fold"} <= flags.keys()
    never = {flag for dest, flag in flags.items() if dest not in read}
    assert not never, f"{script.name}: {never} are never read"


def test_the_value_of_a_flag_stands_in_one_place(monkeypatch):
    """In the recipes, all of them, or as its default: an edited default that recipes override would do nothing."""
    defaults, set_defaults = {}, flags.Parser.set_defaults

    def before_the_recipe(parser, **recipe):
        defaults[parser.prog] = {a.dest: a.default for a in parser._actions}
        set_defaults(parser, **recipe)
    monkeypatch.setattr(flags.Parser, "set_defaults", before_the_recipe)
    everywhere = []
    for name in NAMES:
        module = importlib.import_module(name)
        asked = [module.parse_args(["--dataset", dataset]) for dataset in module.RECIPES if dataset != "own"]
        asked += [module.parse_args(["--task", "qa-open"])] if module is mama else []
        assert not any(value is None for args in asked for value in vars(args).values())
        everywhere.append(set.intersection(*map(set, module.RECIPES.values())) - {"loss"})  # it chooses a recipe
        groups = re.findall(r'^    g\.add_argument\("--([\w-]+)"', Path(module.__file__).read_text(), re.M)
        own = {flag.replace("-", "_") for flag in groups}
        assert not {k for k in own & everywhere[-1] if defaults[f"{name}.py"][k] is not None}, name
    shared = set.intersection(*everywhere) & set.intersection(*map(set, defaults.values()))
    assert not {k for k in shared if defaults["temo.py"][k] is not None}


@pytest.mark.parametrize("name", NAMES)
def test_any_recipe_for_any_data(name, capsys):
    """The values of the set that --recipe names, but for that set's own flags; its place among the evaluation sets is
    that of the data; and what follows from the recipe (mmts.py's ranges, temo.py's rates) follows it."""
    module = importlib.import_module(name)
    for recipe in module.RECIPES:
        known = recipe if recipe != "own" else "other.csv"
        theirs, ours = (vars(module.parse_args(["--dataset", data, "--recipe", recipe])) for data in (known, "my.csv"))
        assert ours["recipe"] == recipe and ours["dataset"] == "my.csv" and not ours["changed"]
        assert ours.get("eval_datasets") == theirs.get("eval_datasets") or "my.csv" in ours["eval_datasets"]
        assert recipe not in ours.get("eval_datasets", ())
        other = {k for k in ours if ours[k] != theirs[k]}
        assert other <= {"dataset", "eval_datasets", "given"}, (recipe, other)
    assert module.parse_args(["--dataset", "my.csv"]).recipe == "own"
    assert module.parse_args([]).recipe == module.parse_args([]).dataset == next(iter(module.RECIPES))
    said = refused(module.parse_args, ["--dataset", "my.csv", "--recipe", "cc4m"], capsys)
    assert said.startswith(f"error: --recipe cc4m: there are {next(iter(module.RECIPES))}, ")


def test_a_recipe_without_a_value_is_refused(monkeypatch, capsys):
    monkeypatch.setitem(ncl.RECIPES, "own", {k: v for k, v in ncl.OWN.items() if k not in ("tau", "lr_end")})
    with pytest.raises(SystemExit):
        ncl.parse_args(["--dataset", "mine.csv"])
    said = "error: --tau/--lr-end: no default; give one in parse_args or in every recipe\n"
    assert capsys.readouterr().err == said


@each_script
def test_same_order_of_sections(script):
    rulers = re.findall(r"^# =+ (\w+) =+$|^    # -+ ([a-z].*?) -+$", script.read_text(encoding="utf8"), re.M)
    names = [a or b.split(" (")[0] for a, b in rulers]
    order = ["METHOD", "flags", "main", "data", "model and optimiser", "views and batches", "loop", "save and evaluate"]
    assert [n for n in names if n in order] == order


@each_script
def test_method_stands_right_after_the_imports(script):
    tree = ast.parse(script.read_text(encoding="utf8"))
    kinds = [type(n).__name__ for n in tree.body]
    first = next(i for i, k in enumerate(kinds) if k not in ("Import", "ImportFrom") and i)
    assert kinds[0] == "Expr" and kinds[first] == "FunctionDef"
    lines = script.read_text(encoding="utf8").splitlines()
    assert any("= METHOD =" in line for line in lines[tree.body[first - 1].lineno - 1:tree.body[first].lineno])


@each_script
def test_the_loop_is_in_the_open(script):
    """`loss = ...`, the backward, the optimiser and its step stand in main; Run has none of them."""
    tree = ast.parse(script.read_text(encoding="utf8"))
    main = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main")
    loop = next(n for n in main.body if isinstance(n, ast.For) and ast.unparse(n.iter) == "batches")
    text = ast.unparse(loop)
    assert re.search(r"^\s+loss = ", text, re.M) and "chunks.backward(loss)" in text and "optimizer.step()" in text
    assert "torch.optim." in ast.unparse(main)
    nested = [n for n in ast.walk(loop) if isinstance(n, ast.FunctionDef | ast.Lambda)]
    assert not nested, "the loss stands in a closure"
    book_keeping = ast.parse((ROOT / "contrastive" / "engine" / "run.py").read_text(encoding="utf8"))
    run = ast.unparse(next(n for n in book_keeping.body if isinstance(n, ast.ClassDef) and n.name == "Run"))
    forward = r"self\.(model|tower|trained)\("
    for work in (forward, r"\.backward\(", r"optimizer\.step\(", r"zero_grad\(", r"torch\.optim"):
        assert not re.search(work, run), work


@each_script
def test_a_script_is_named_by_its_file(script):
    """Nothing in a script repeats its own name but its docstring: a copy is another script."""
    code = script.read_text(encoding="utf8").split('"""', 2)[2]
    assert script.name not in code
    assert code.count("__file__") == 2


LOSSES = {"temo": "temo_loss multimodal_loss cwcl_loss simclr_loss", "mmts": "clip_loss max_margin_loss",
          "ncl": "ncl_loss max_margin_loss", "mama": "answer_loss angular_margin_loss fused_margin_loss",
          "temperature_schedules": "nt_xent moco_loss"}


@each_script
def test_the_loop_calls_the_losses_that_a_fork_edits(script):
    """Not their parts: an edit of the equation's function would change nothing."""
    tree = ast.parse(script.read_text(encoding="utf8"))
    main = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main")
    names = {n.id for n in ast.walk(main) if isinstance(n, ast.Name)}
    assert {*LOSSES[script.stem].split()} <= names


OF_TWO = {
    "temo": lambda a, b: temo.temo_loss(a, b, b.flip(0), a.flip(0), 0.5),
    "cwcl": lambda a, b: temo.cwcl_loss(a, b, 0.05),
    "ncl": lambda a, b: ncl.ncl_loss(a, b, 0.01), "hardest negative": ncl.max_margin_loss,
    "mama": lambda a, b: mama.angular_margin_loss(a, b, 0.05, 0.2), "clip": lambda a, b: mmts.clip_loss(a, b, 0.05),
    "max-margin": lambda a, b: mmts.max_margin_loss(a, b, 0.2), "ts": lambda a, b: ts.nt_xent(a, b, 0.05),
    "moco": lambda a, b: ts.moco_loss(a, b, b.flip(0), 0.05),
    "answers": lambda a, b: mama.answer_loss(a, torch.arange(len(a)) % 32)}


@pytest.mark.parametrize("loss", OF_TWO)
def test_a_loss_is_fp32_under_bf16_autocast(loss):
    """And of embeddings in 16 bits."""
    a, b = (unit(64, 32, seed=s).float() for s in (0, 1))
    expected, rounded = OF_TWO[loss](a, b), OF_TWO[loss](a.bfloat16().float(), b.bfloat16().float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, of_16_bits = OF_TWO[loss](a, b), OF_TWO[loss](a.bfloat16(), b.bfloat16())
    assert inside.dtype == of_16_bits.dtype == torch.float32
    assert torch.equal(inside, expected) and torch.equal(of_16_bits, rounded)


RATES = ["-1", "1e31", "nan", "inf", "fast"]
OPTIMISER = {"beta1": ["-0.1", "1", "1.5", "nan"], "beta2": ["-0.1", "1", "0.99999999", "nan"],
             "eps": ["0", "-1", "1e-40", "1e40", "nan"], "lr": RATES, "lr-end": RATES, "weight-decay": RATES,
             "warmup-epochs": ["-1", "nan"], "grad-clip": ["-1", "inf"], "meta-lr": RATES, "virtual-lr": RATES}


@each_script
def test_an_optimiser_takes_what_its_flags_take(script, capsys, monkeypatch):
    """What torch would refuse with a traceback, at the start or in the first step, is one line and exit code 2."""
    monkeypatch.syspath_prepend(str(ROOT))
    parse = importlib.import_module(script.stem).parse_args
    for flag, values in OPTIMISER.items():
        for value in values if script.stem == "mama" or flag.split("-")[0] not in ("meta", "virtual") else ():
            with pytest.raises(SystemExit) as end:
                parse([f"--{flag}", value])
            said = capsys.readouterr().err
            assert end.value.code == 2 and said.count("\n") == 1 and said.startswith(f"error: --{flag}"), (said, value)
    for kind in ("adamw", "adam", "sgd"):
        of_adam = kind != "sgd"
        least = parse(["--optimizer", kind, *"--beta1 0 --lr 0 --weight-decay 0".split(),
                       *"--beta2 0 --eps 1e-30".split() * of_adam])
        most = parse(["--optimizer", kind, *"--beta1 0.9999999 --lr 1e30 --weight-decay 1e30".split(),
                      *"--beta2 0.9999999 --eps 1e30".split() * of_adam])
        usual = parse(["--optimizer", kind])
        for args, fused in itertools.product((least, most, usual), (None, True)):  # the block of the script itself
            tower, own = torch.nn.Linear(2, 2), torch.nn.Module()
            names = {"common": common, "torch": torch, "args": args, "learnt": [tower, own],
                     "run": argparse.Namespace(fused=fused)}
            exec(textwrap.dedent("    " + blocks(script)["optimizer"].strip()), names)
            kernels, rest = names["optimizer"].param_groups
            assert [p.ndim for p in kernels["params"]] == [2] and [p.ndim for p in rest["params"]] == [1]
            assert (kernels["weight_decay"], rest["weight_decay"]) == (args.weight_decay, 0)
            for group in (kernels, rest):
                asked = {"betas": (args.beta1, args.beta2), "eps": args.eps} if of_adam else {"momentum": args.beta1}
                assert {k: group[k] for k in ("lr", *asked)} == {"lr": args.lr, **asked}
            tower(torch.ones(1, 2)).sum().backward()
            names["optimizer"].step()


@each_script
def test_a_number_has_a_range(script, capsys):
    """What no flag of a number takes, in the script's own flags; temo: in those of all scripts, too."""
    parse = importlib.import_module(script.stem).parse_args
    files = [script, *([ROOT / "contrastive" / "engine" / "flags.py"] if script.stem == "temo" else [])]
    calls = [node for f in files for node in ast.walk(ast.parse(f.read_text(encoding="utf8")))
             if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
             and isinstance(node.args[0], ast.Constant)]                   # not the choosers, copies of these flags
    asked = 0
    for call in calls:
        more = {k.arg: k.value for k in call.keywords}
        for value in ("nan", "-1000000001") if "type" in more else ():
            flag, times = call.args[0].value, ast.literal_eval(more["nargs"]) if "nargs" in more else 1
            said = refused(parse, [flag, *[value] * times], capsys)
            assert said.startswith(f"error: {flag} ") and value in said, said
            asked += 1
    assert asked > 20


def test_containers_are_asked_not_told_apart():
    for path in [ROOT / "common.py", ROOT / "eval.py", *SCRIPTS, *ROOMS]:
        for word in (r"isinstance\([^()]+, (common\.)?(Data|Stream)\)", r"object\.__new__", r"__dict__\.update"):
            assert not re.search(word, path.read_text(encoding="utf8")), (path, word)


def test_ruff(tmp_path):
    """Line width (E501), names, imports: the rules stand in pyproject.toml. The answer does not hang on what else lies
    in the clone: a run's folder `runs`, or folders called as any module that is imported."""
    for file in [ROOT / "pyproject.toml", *(f for room in FILES for f in ROOT.glob(room))]:
        (tmp_path / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, tmp_path / file.relative_to(ROOT))
    everything = "".join(f.read_text(encoding="utf8") for room in FILES for f in ROOT.glob(room))
    names = {"runs", "data", *re.findall(r"^ *(?:import|from) (\w+)", everything, re.M)}
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    for bare in (True, False):
        for name in () if bare else names:
            (tmp_path / name).mkdir(exist_ok=True)
        done = subprocess.run([ruff, "check", "--no-cache", "--output-format", "concise", "."], cwd=tmp_path,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_learning_rates():
    """After two steps of warm-up from 4 to 1 at the end: half way cosine and line meet, not a quarter before."""
    rates = {kind: [common.cosine_lr(k, 10, 2, 4.0, 1.0, kind) for k in (0, 1, 2, 4, 6, 10)]
             for kind in ("cosine", "linear", "constant")}
    assert rates["linear"] == pytest.approx([2, 4, 4, 3.25, 2.5, 1])
    assert rates["cosine"] == pytest.approx([2, 4, 4, 1 + 1.5 * (1 + 0.5 ** 0.5), 2.5, 1])
    assert rates["constant"] == [2, 4, 4, 4, 4, 4]
