"""The five scripts side by side: a short run, a learnt tau, every flag acts, the views; then
docs/forking.md."""

import contextlib
import functools
import importlib
import inspect
import io
import math
import re
from pathlib import Path
from typing import NamedTuple

import common
from contrastive import figures
from contrastive.engine.run import Run

import pytest
import torch
from torch.utils._pytree import tree_flatten

import eval as eval_py
import mama
import mmts
import ncl
import temo
from helpers import few_steps, fork, losses, refused, rows, run_script, steps, write_images

NAMES = ("temperature_schedules", "mmts", "ncl", "mama", "temo")
TOTAL, CLIP = 10, 1e-2
SMALL = [
    *"--cpu --workers 0 --dataset moving-emoji --clips 32 16 16 --frames 2 --image-size 16".split(),
    *"--batch-size 16 --log-every 1 --eval-every 0".split(),
]  # two steps an epoch
SLOPE = [
    *f"--max-steps {TOTAL} --warmup-epochs 1 --lr 1 --lr-schedule linear --lr-end 0.1".split(),
    *f"--optimizer sgd --beta1 0 --weight-decay 0 --grad-clip {CLIP}".split(),
]
OF = {
    "temperature_schedules": ["--period", "3"],
    "mmts": ["--num-clusters", "4"],
    "mama": ["--meta-size", "4", "--meta-batch-size", "2"],
}
PICTURES = {
    "temo": {"curves", "evaluation", "retrieval", "similarities", "positive_pairs"},
    "temperature_schedules": {"curves", "classes", "figures"},
    "mmts": {
        "curves",
        "evaluation",
        "retrieval",
        "temperatures",
        "distribution",
        "tsne",
        "clusters",
    },
    "ncl": {"curves", "retrieval", "normalization", "modalities"},
    "mama": {"curves", "retrieval", "weights"},
}
each_script = pytest.mark.parametrize("name", NAMES)


@each_script
def test_a_run(name, tmp_path, monkeypatch):
    """A step of SGD goes as far as its rate and the clip say; what a run leaves; nothing in it runs
    code."""
    folder, seen = tmp_path / "run", []

    def watch(method):
        def after(run, *args):
            out = method(run, *args)
            seen.append(
                [p.detach().clone() for g in run.optimizer.param_groups for p in g["params"]]
            )
            return out

        return after

    for method in ("begin", "done"):
        monkeypatch.setattr(Run, method, watch(getattr(Run, method)))
    script = importlib.import_module(name)
    summary = run_script(script, folder, *SLOPE, *OF.get(name, ()), base=SMALL, pictures=True)
    log = steps(folder)
    assert [row["step"] for row in log] == [*range(1, TOTAL + 1)]
    assert [row["lr"] for row in log] == pytest.approx(
        [1.0, *(0.1 + 0.9 * (1 - k / 9) for k in range(9))]
    )
    ways = [
        sum((a - b).square().sum().item() for a, b in zip(*two)) ** 0.5
        for two in zip(seen, seen[1:])
    ]
    assert ways == pytest.approx([row["lr"] * CLIP for row in log], rel=1e-2)
    assert (summary["script"], summary["dataset"], summary["steps"], summary["batch"]) == (
        name,
        "moving-emoji",
        10,
        16,
    )
    assert summary["processes"] == 1
    assert summary["bad_samples"] == 0
    assert summary["chance"]["moving-emoji"]
    assert PICTURES[name] == {p.stem for p in folder.glob("*.png") if p.stat().st_size > 5000}
    suffixes = {p.suffix for p in folder.rglob("*") if p.is_file()}
    assert suffixes <= {".json", ".jsonl", ".safetensors", ".png", ".pt"}
    model, tokenizer, transform = common.load_model(folder)
    features = model(transform(torch.zeros(2, 3, 30, 40, dtype=torch.uint8))[None])[2]
    assert features.shape == (1, model.vision.width)
    assert bool(tokenizer) == (name != "temperature_schedules")


LEARNT = {
    "temo": "--loss infonce",
    "temperature_schedules": "--schedule fixed",
    "ncl": "",
    "mama": "",
    "mmts": "--baseline --clusters none",
}


@each_script
def test_a_learnt_tau_is_logged_as_the_step_used_it_and_does_not_decay(name, tmp_path):
    script = importlib.import_module(name)
    flags = f"{LEARNT[name]} --learnable-tau --max-steps 2 --lr 0.1 --weight-decay 0.3".split()
    base = [*SMALL, *OF.get(name, ())]
    log = few_steps(script, tmp_path / "a", *flags, "--save-every", 1, base=base)
    state = torch.load(tmp_path / "a" / "checkpoints" / "step_1.pt", weights_only=True)
    tau = state["own"]["tau.log_tau"].exp().item()  # after the first step
    first_tau = 0.2 if name == "temperature_schedules" else 0.1
    assert log[0]["tau"] == pytest.approx(first_tau, rel=1e-6)
    assert log[1]["tau"] == pytest.approx(tau, rel=1e-6) != pytest.approx(first_tau, rel=1e-3)
    *_, last = state["optimizer"]["param_groups"]
    assert last["weight_decay"] == 0 and len(last["params"]) == 1


# ----------------------------------------------- every flag acts ----------------------------------
ACTS = {  # script, flags: what changes the losses of a run with them
    (
        "temo",
        "",
    ): "--tau .2, --tau-min .1, --tau-alpha .3, "
    "--row a, --row b, --row c, --row d, --row e, --row f, "
    "--detach-tau, --similarity cosine, --grad-augmented, --image-aug crop, --image-aug simclr, "
    "--loss infonce, --loss ts, --loss dystress, --loss dystress-shifted, --loss cwcl, "
    "--loss slip, "
    # of all scripts
    "--seed 1, --batch-size 8, --lr .1, --optimizer sgd, --optimizer adam, --lr-schedule constant, "
    "--lr-schedule linear, --lr-end .01, --warmup-fraction .5, --weight-decay 0, "
    "--beta1 .5, --beta2 .5, "
    "--eps .1, --grad-clip .01, --image-size 24, --frames 3, --text-length 5, --embed-dim 8, "
    "--image-stats imagenet, --clean-captions, "
    "--unfold-captions, --caption-noise .9, --mixed-precision bf16",
    ("temo", "--loss infonce"): "--learnable-tau",
    ("temo", "--loss infonce --learnable-tau --lr .1"): "--tau-clamp .099 .101",
    (
        "temperature_schedules",
        "",
    ): "--loss moco, --schedule step, --schedule random, --schedule fixed, "
    "--schedule oscillating, --tau-min .2, --tau-max .5, --tau-head 1 --tau-tail .1, "
    "--head-norm batch, --imbalance-ratio 2",
    ("temperature_schedules", "--imbalance-ratio 2"): "--split-seed 1",
    ("temperature_schedules", "--schedule fixed"): "--learnable-tau",
    ("temperature_schedules", "--loss moco --queue-size 64"): "--queue-size 32, --momentum .5",
    ("temperature_schedules", "--weight-decay .9"): "--decay-all",
    (
        "mmts",
        "",
    ): "--alpha .02, --shift-min .06, --shift-max .2, --periods 1.5, --num-clusters 5, --no-schedule, "
    "--no-shifts, --baseline, --loss max-margin --alpha .2 --shift-min .1 --shift-max .3",
    ("mmts", "--clusters verb"): "--clusters noun",
    ("mmts", "--no-shifts"): "--tau .2, --no-schedule",
    ("mmts", "--baseline --loss max-margin"): "--margin .3",
    ("mmts", "--baseline"): "--learnable-tau",
    (
        "ncl",
        "",
    ): "--loss infonce, --learnable-tau, --iterations 1, --tau .2",
    (
        "mama",
        "--a0 8",
    ): "--weighting joint, --weighting focal, --weighting spl, --weighting l2rw, --weighting none, "
    "--margin-schedule constant, --a0 4, --a1 20, --a2 1, --tau .2, "
    "--meta-lr .1, --virtual-lr 5, --meta-size 9, --meta-batch-size 4, --meta-every 2, "
    "--meta-set val, --learnable-tau, --weight-hidden 5",
    ("mama", ""): "--baseline, --margin-schedule none",
    ("mama", "--weighting focal"): "--focal-gamma 1",
    ("mama", "--weighting spl"): "--spl-start .9",
}


class Outcome(NamedTuple):
    """Of three steps of a script."""

    losses: list
    useless: set  # flags that are named as without an effect


@pytest.fixture(scope="module")
def outcome_of(tmp_path_factory):
    """Function of a script and flags -> Outcome, once for each."""

    @functools.cache
    def run(name, words):
        base = [*SMALL, *OF.get(name, ()), "--max-steps", "3"]
        folder = tmp_path_factory.mktemp("acts") / "a"
        with contextlib.redirect_stdout(io.StringIO()) as said:
            few_steps(importlib.import_module(name), folder, *words.split(), base=base)
        useless = re.findall(r"WARNING: (--[\w-]+) has no effect", said.getvalue())
        return Outcome(losses(folder), set(useless))

    return run


@pytest.mark.parametrize(
    "name, words, flag", [(*of, flag) for of, flags in ACTS.items() for flag in flags.split(", ")]
)
def test_every_flag_acts(outcome_of, name, words, flag):
    """And is not said to be useless: test_flags.py has those that are."""
    without, acts = outcome_of(name, words), outcome_of(name, f"{words} {flag}")
    assert len(without.losses) == 3 and acts.losses != without.losses
    assert not acts.useless & set(re.findall(r"--[a-z][\w-]*", f"{words} {flag}"))


# ----------------------------------------------- a choice without a branch ------------------------
@each_script
def test_a_choice_of_a_loss_without_a_branch_is_an_error(name, tmp_path):
    """Adding a choice touches the list and the branch; without the branch nothing else is trained.
    """
    script = importlib.import_module(name)
    text = Path(script.__file__).read_text(encoding="utf8")
    choices = re.search(r'"--loss",[^)]*?choices=\[', text)[0]
    own = fork(script, tmp_path, choices, f'{choices}"sigmoid", ')
    flags = [*OF.get(name, ()), "--loss", "sigmoid", "--max-steps", "1"]
    with pytest.raises(ValueError, match="^--loss sigmoid has no branch in this loop$"):
        few_steps(own, tmp_path / "a", *flags, base=SMALL)


# ----------------------------------------------- views --------------------------------------------
JITTERED = {
    "flags": "--crop-min .3 --flip .1 --jitter .2",
    "views": [
        dict(scale_min=0.3, flip=0.1, jitter_p=1, brightness=0.2, contrast=0.2, saturation=0.2)
    ],
}
STRONG = dict(
    scale_min=0.6,
    flip=0.7,
    jitter_p=0.8,
    brightness=0.15,
    contrast=0.15,
    saturation=0.15,
    hue=0.45,
    grey=0.55,
    blur=0.65,
)
VIEWS = {
    "ncl": JITTERED,
    "mama": JITTERED,
    "mmts": {
        "flags": f"{JITTERED['flags']} --randaugment-ops 1 --randaugment-magnitude 5",
        "views": [JITTERED["views"][0] | dict(randaugment=(1, 5))],
    },
    "temperature_schedules": {
        "flags": "--crop-min .6 --flip .7 --jitter-p .8 --jitter .15 --hue .45 --grey .55 "
        "--blur .65",
        "views": [STRONG] * 2,
    },
    "temo": {
        "flags": "--crop-min .3 --flip .1 --jitter .2 --randaugment-ops 1 "
        "--randaugment-magnitude 5 --image-aug simclr --aug-crop-min .6 --aug-flip .7 "
        "--aug-jitter .15 --aug-hue .45 --aug-blur .65",
        "views": [
            JITTERED["views"][0] | dict(jitter_p=0.8, randaugment=(1, 5)),
            STRONG | dict(grey=0.2),
        ],
    },
}


@pytest.fixture
def views_of(tmp_path, monkeypatch):
    """Function of a script's name and flags -> its views, as dicts."""
    batches = Run.batches

    def found(name, flags):
        seen = []
        monkeypatch.setattr(
            Run,
            "batches",
            lambda run, views, *more: seen.extend(views) or batches(run, views, *more),
        )
        words = [*OF.get(name, ()), *flags.split(), "--image-size", 24, "--max-steps", 1]
        few_steps(importlib.import_module(name), tmp_path / "run", *words, base=SMALL)
        return [vars(view) for view in seen]

    return found


@each_script
def test_each_strength_of_a_view_is_that_of_its_own_flag(name, views_of):
    usual = dict(size=24, hue=0, grey=0, blur=0, randaugment=(0, 0), squash=False)
    assert views_of(name, VIEWS[name]["flags"]) == [usual | view for view in VIEWS[name]["views"]]


@pytest.mark.parametrize(
    "words, flips",
    [
        ("", [0.3, 0.3]),
        ("--image-aug crop", [0.3, 0]),
        ("--row e", [0.3]),
        ("--loss slip --aug-flip 0.1", [0.3, 0.1, 0.1]),
    ],
)
def test_the_views_of_temo_s_losses(words, flips, views_of):
    assert [view["flip"] for view in views_of("temo", f"--flip 0.3 {words}")] == flips


# ----------------------------------------------- docs/forking.md ----------------------------------
PAGE = Path(temo.__file__).with_name("docs") / "forking.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf8"), re.S)
END = "\n# ======================================================= flags ==="  # of METHOD
PLACE = "    loss_modules.to(run.device)\n"
TINY = [*SMALL, *"--max-steps 4 --embed-dim 8 --batch-size 8".split()]


def test_a_weighting_is_what_is_said_and_drawn(tmp_path, capsys):
    own = fork(mama, tmp_path, END, f"\n{BLOCKS[0]}\n{END}")
    own = fork(own, tmp_path, PLACE, f"{BLOCKS[1]}{PLACE}")
    branch = '        elif args.weighting == "none":\n'
    own = fork(own, tmp_path, branch, f"{BLOCKS[2]}{branch}")
    own = fork(own, tmp_path, '"l2rw", "none"]', '"l2rw", "median", "none"]')
    own = fork(
        own, tmp_path, "\nif __name__ ==", "\nrandom_guess = lambda *_: None\nif __name__ =="
    )
    run_script(own, tmp_path / "a", *TINY, *"--weighting median --a0 2".split(), pictures=True)
    said = capsys.readouterr().out
    assert "--weighting median" in said
    assert not any(word in said for word in ("meta-data", "METHOD", "random guess"))
    assert (tmp_path / "a" / "weights.png").is_file()
    assert {row["w"] for row in steps(tmp_path / "a")} != {1.0}


NO_BRANCH = (
    "        else:\n"
    '            raise ValueError(f"--loss {args.loss} has no branch in this loop")\n'
)
OWN_LOSS = {  # the choices, and a branch
    mmts: (
        'choices=["clip", "max-margin"',
        '        elif args.loss == "mine":\n'
        "            loss = clip_loss(image, text, 2 * tau_or_margin)\n",
    ),
    mama: (
        'choices=["mama", "infonce"',
        '        elif args.loss == "mine":\n'
        '            sample_loss = 2 * pair_loss(encoded, inputs.get("answers"), tau, mu)\n',
    ),
}


@pytest.mark.parametrize("words", ["", "--no-shifts --no-schedule"])
def test_a_loss_of_one_s_own_in_mmts_touches_two_places(words, tmp_path, capsys):
    log = run_own_loss(mmts, tmp_path, f"--num-clusters 4 {words}")
    assert "temperature  0." in capsys.readouterr().out
    assert all(row["loss"] > 0 and row["tau"] > 0 for row in log)


def test_a_loss_of_one_s_own_in_mama_touches_two_places(tmp_path, capsys):
    log = run_own_loss(mama, tmp_path, "--meta-size 16 --meta-batch-size 8")
    assert "random guess" not in capsys.readouterr().out
    assert all(row["loss"] > 0 for row in log)


def run_own_loss(script, folder, words):
    choices, branch = OWN_LOSS[script]
    own = fork(script, folder, choices, f'{choices}, "mine"')
    own = fork(own, folder, NO_BRANCH, branch + NO_BRANCH)
    return few_steps(own, folder / "a", *TINY, "--loss", "mine", *words.split())


def test_a_part_of_own_with_a_rate_of_its_own(tmp_path):
    own = fork(mmts, tmp_path, PLACE, f'    loss_modules["net"] = nn.Linear(8, 1)\n{PLACE}')
    own = fork(own, tmp_path, "    trained_modules = [tower, loss_modules]\n", BLOCKS[5])
    own = fork(own, tmp_path, "    # <<< shared\n", f"    # <<< shared\n{BLOCKS[6]}")
    own = fork(
        own,
        tmp_path,
        "\n        run.check_finite",
        '\n        loss = loss + loss_modules["net"](image).mean()\n        run.check_finite',
    )
    log = few_steps(
        own, tmp_path / "a", *TINY, *"--num-clusters 4 --max-steps 2 --weight-decay 0.3".split()
    )
    state = torch.load(tmp_path / "a" / "checkpoints" / "step_2.pt", weights_only=True)
    rates, decays = (
        [group[key] for group in state["optimizer"]["param_groups"]]
        for key in ("lr", "weight_decay")
    )
    assert rates == pytest.approx([log[1]["lr"] * factor for factor in (1, 1, 10, 10)])
    assert decays == [0.3, 0, 0.3, 0]


def test_a_schedule_is_what_is_said_and_refused(tmp_path, capsys):
    own = fork(mmts, tmp_path, inspect.getsource(mmts.base_temperature), BLOCKS[3])
    log = few_steps(own, tmp_path / "a", *TINY, *"--num-clusters 4 --periods 1 --alpha 0.1".split())
    assert "temperature  0.03 .. 0.17" in capsys.readouterr().out
    assert all(row["tau"] <= 0.17 - 0.025 * k + 1e-6 for k, row in enumerate(log))
    said = refused(own.parse_args, [*TINY, "--periods", "2", "--alpha", "0.08"], capsys)
    assert "the temperatures of the run, -0.04 .. 0.16, must be above 0" in said


def test_a_backbone_and_a_data_set_of_one_s_own_are_trained_and_evaluated(tmp_path, monkeypatch):
    """From the folder of the pictures. The fork's name stands in what it leaves."""
    for split, n in (("train", 24), ("test", 8)):
        write_images(tmp_path / "pictures" / split, range(n))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(common.SETS, "mine", None)  # it goes with this test
    text = (
        Path(temo.__file__)
        .read_text(encoding="utf8")
        .replace(END, f"\n{BLOCKS[4]}\n\n{BLOCKS[7]}\n{END}", 1)
    )
    text = text.replace(
        "import argparse\n", "import argparse\nfrom pathlib import Path\n\nimport timm\n", 1
    )
    (tmp_path / "my_temo.py").write_text(text, encoding="utf8")
    own = importlib.import_module("my_temo")
    flags = (
        "--cpu --workers 0 --image-size 16 --batch-size 8 --max-steps 2 --eval-every 0 "
        "--dataset mine --image-encoder mynet --loss infonce --learnable-tau"
    ).split()
    summary = run_script(own, tmp_path / "a", *flags)
    assert summary["script"] == "my_temo" and summary["test"]["mine"]["images"] == 8
    flags = "--import my_temo --checkpoint a --cpu --workers 0 --tasks retrieval".split()
    evaluated = eval_py.main(eval_py.parse_args(flags))["datasets"]["mine"]["metrics"]
    assert {k: summary["test"]["mine"][k] for k in evaluated} == evaluated
    names = {}
    exec(BLOCKS[8].replace("runs/NAME", "a"), names)
    assert names["own"].keys() == {"tau.log_tau"}


def test_an_encoder_that_is_not_used_is_frozen(tmp_path):
    frozen = fork(ncl, tmp_path, PLACE, f"    tower.text.requires_grad_(False)\n{PLACE}")
    whole, chunks = (
        [row["loss"] for row in few_steps(frozen, tmp_path / f"{n}", *TINY, "--chunk-size", n)]
        for n in (0, 4)
    )
    assert chunks == pytest.approx(whole, rel=1e-4)


def test_the_loop_with_weights():
    """Of the page: the weight network learns, and its weights are in the encoders' loss."""

    class Pair(torch.nn.ModuleList):
        def forward(self, video, text):
            return self[0](video), self[1](text)

    torch.manual_seed(0)
    model = Pair([torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)])
    loader = [(torch.randn(6, 8), torch.randn(6, 8)) for _ in range(3)]
    names = dict(
        model=model,
        loader=loader,
        meta_loader=loader[::-1],
        lr=5e-6,
        tau=0.5,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
    )
    before = model[0].weight.clone()
    (code,) = (block for block in BLOCKS if "weightnet_gradient" in block)
    exec(code, names)
    sizes = names["gradient"][0].abs()  # the page: 1e-8 to 1e-7
    assert not torch.equal(before, model[0].weight) and 0 < sizes[sizes > 0].median() < 1e-7


# ----------------------------------------------- the log ------------------------------------------
def test_without_a_terminal_a_run_writes_a_line_for_each_row_of_its_log(tmp_path, capsys):
    few_steps(temo, tmp_path / "run", "--max-steps", 4, "--log-every", 2, base=SMALL[:-4])
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if line.startswith("step ")]
    row = r"step {} of 4: L_MM \d\.\d{{3}}, tau_pos 0\.\d{{3}}, samples \d+/s, \d+ s left"
    assert len(lines) == 2 and "\r" not in err
    for k, line in zip((2, 4), lines):
        assert re.fullmatch(row.format(k), line)
    # without L_MM in the loss
    flags = ["--no-base", "--max-steps", 1, "--log-every", 1]
    few_steps(temo, tmp_path / "other", *flags, base=SMALL[:-4])
    assert "step 1 of 1: loss " in capsys.readouterr().out


def test_a_scalar_parameter_of_the_loss_is_in_the_log_without_a_line_of_code(tmp_path):
    new = (
        "    loss_modules['bias'] = nn.ParameterDict("
        "{'b': nn.Parameter(torch.tensor(-10.0))})\n"
        "    loss_modules['other'] = Temperature(0.5, (0.1, 1.0))\n"
    )
    script = fork(temo, tmp_path, PLACE, new + PLACE)
    flags = ["--learnable-tau", "--max-steps", 1, "--eval-every", 0]
    row = few_steps(script, tmp_path / "run", *flags, base=SMALL)[0]
    assert row["bias.b"] == -10 and "tau.log_tau" not in row
    assert row["other.log_tau"] == pytest.approx(math.log(0.5))


def test_wandb_gets_a_project_and_the_name_of_the_run(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from contrastive.engine.log import Log

    for project in ("contrastive", "mine"):
        calls = []
        accelerator = SimpleNamespace(
            project_configuration=SimpleNamespace(logging_dir=""),
            init_trackers=lambda *args, **options: calls.append((args, options)),  # noqa: B023
        )
        args = SimpleNamespace(tracker="wandb", lr=0.1)
        run = SimpleNamespace(folder=tmp_path / "r", accelerator=accelerator, args=args, step=0)
        Log(run).open(run)
        ((name,), options), = calls
        assert name == project and options["init_kwargs"]["wandb"]["name"] == "r"
        monkeypatch.setenv("WANDB_PROJECT", "mine")


@each_script
def test_evaluations_on_the_way_change_nothing_of_the_training(name, tmp_path):
    """Weights, optimiser, queues and torch's random state are bitwise the same; six are the default.
    """
    script = importlib.import_module(name)
    states = {}
    for interval in (0, -1):
        folder = tmp_path / f"every_{interval}"
        run_script(script, folder, *SMALL[:-2], "--max-steps", 6, "--eval-every", interval,
                   *OF.get(name, ()))
        state = torch.load(folder / "checkpoints" / "step_6.pt", weights_only=True)
        del state["wall_s"]
        # libraries draw from the generators of Python and numpy when they are imported
        state["processes"] = state["processes"][0]["cpu"]
        states[interval] = tree_flatten(state)
        evaluations = [row["step"] for row in rows(folder) if "eval" in row]
        assert evaluations == ([0, 6] if interval == 0 else [*range(7)])
    values, structure = states[0]
    other_values, other_structure = states[-1]
    assert structure == other_structure
    for value, other in zip(values, other_values):
        if torch.is_tensor(value):
            assert torch.equal(value, other)
        else:
            assert value == other
