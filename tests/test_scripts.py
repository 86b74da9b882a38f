"""The five scripts side by side: a run of each, a learnt tau, flags that act, views, the log."""

import contextlib
import functools
import importlib
import io
from types import SimpleNamespace

from contrastive.core.files import read_json
from contrastive.engine.log import Log
from contrastive.engine.run import Run

import pytest
import torch
from safetensors.torch import load_file

from helpers import few_steps, losses, rows, run_script, steps, tensors_of

TS = "temperature_schedules"
NAMES = (TS, "mmts", "ncl", "mama", "temo")
SMALL = (
    "--cpu --workers 0 --dataset moving-emoji --clips 32 16 16 --frames 2 --image-size 16 "
    "--batch-size 16 --log-every 1 --eval-every 0").split()  # two steps an epoch
FLAGS = {  # of a script, beside SMALL
    "mmts": ["--num-clusters", "4"],
    "mama": ["--meta-size", "4", "--meta-batch-size", "2"]}
each_script = pytest.mark.parametrize("name", NAMES)


def base_of(name):
    return [*SMALL, *FLAGS.get(name, ())]


# ----------------------------------------------- a run -------------------------------------------
TOTAL, CLIP = 10, 1e-2
SLOPE = (
    f"--max-steps {TOTAL} --save-every 1 --warmup-fraction 0.1 --lr 1 --lr-schedule linear "
    f"--lr-end 0.1 --optimizer sgd --betas 0 0 --weight-decay 0 --grad-clip {CLIP}").split()
PICTURES = {
    "temo": "curves evaluation retrieval similarities",
    TS: "curves classes figures",
    "mmts": "curves evaluation retrieval temperatures distribution tsne clusters",
    "ncl": "curves retrieval normalization modalities",
    "mama": "curves retrieval weights"}


@pytest.fixture(scope="module")
def walk_of(tmp_path_factory):
    """Function of a script -> the folder of a run with pictures, made once."""

    @functools.cache
    def run(name):
        folder = tmp_path_factory.mktemp("runs") / "run"
        run_script(
            importlib.import_module(name), folder, *SLOPE, base=base_of(name), pictures=True)
        return folder

    return run


@each_script
def test_learning_rate_is_that_of_the_schedule(name, walk_of):
    log = steps(walk_of(name))
    assert [row["step"] for row in log] == [*range(1, TOTAL + 1)]
    expected = [1.0, *(0.1 + 0.9 * (1 - k / 9) for k in range(9))]
    assert [row["lr"] for row in log] == pytest.approx(expected)


@each_script
def test_a_step_goes_as_far_as_its_rate_and_the_clip_say(name, walk_of):
    """The last step, of the encoders and of TS's head."""
    folder = walk_of(name)
    before, after = tensors_of(folder, TOTAL - 1), tensors_of(folder, TOTAL)
    changes = []
    for path, x in after.items():
        if path.startswith(("model/", "head/")):
            changes.append((x - before[path]).flatten())
    last_lr = steps(folder)[-1]["lr"]
    assert torch.cat(changes).norm() == pytest.approx(last_lr * CLIP, rel=1e-2)


@each_script
def test_summary_says_what_ran(name, walk_of):
    expected = {
        "script": name, "dataset": "moving-emoji", "steps": TOTAL, "batch": 16, "processes": 1,
        "bad_samples": 0}
    summary = read_json(walk_of(name) / "summary.json")
    assert {key: summary[key] for key in expected} == expected
    assert summary["chance"]["moving-emoji"]
    names = {"seed", "wall_s", "samples_per_s", "peak_memory_mib", "parameters", "versions"}
    assert names <= summary.keys()


@each_script
def test_a_run_leaves_its_pictures(name, walk_of):
    pictures = {path.stem for path in walk_of(name).glob("*.png")}
    assert pictures == set(PICTURES[name].split())


def test_ncl_saves_val_before_training(walk_of):
    before = load_file(walk_of("ncl") / "val_before.safetensors")["moving-emoji/image"]
    after = load_file(walk_of("ncl") / "val.safetensors")["moving-emoji/image"]
    assert before.shape == after.shape
    assert not torch.equal(before, after)


@pytest.mark.parametrize("names, stems", [
    (["/data/a.csv", "coco"], ["a", "coco"]),
    (["/data/a.csv", "/more/a.csv"], ["/data/a.csv", "/more/a.csv"]),  # none takes another's place
])
def test_trackers_name_a_table_without_its_folders(names, stems, tmp_path):
    logged = []
    accelerator = SimpleNamespace(log=lambda numbers, step: logged.extend(numbers))
    args = SimpleNamespace(tracker="wandb")
    log = Log(SimpleNamespace(folder=tmp_path, accelerator=accelerator, args=args, step=0))
    log.write({"step": 1, "eval": {name: {"R@1": 1.0} for name in names}})
    assert logged == ["step", *(f"eval/{stem}/R@1" for stem in stems)]


@each_script
def test_evaluations_on_the_way_change_nothing_of_the_training(name, tmp_path):
    """Weights, optimiser, queues and torch's random state are bitwise the same."""
    states = []
    for interval in (0, -1):
        folder = tmp_path / f"every {interval}"
        flags = [*base_of(name), "--max-steps", 6, "--eval-every", interval]
        run_script(importlib.import_module(name), folder, *flags)
        states.append(tensors_of(folder, 6))
    whole, evaluated = states
    assert [row["step"] for row in rows(folder) if "eval" in row] == [*range(7)]
    assert whole.keys() == evaluated.keys()
    for key, x in whole.items():
        # libraries draw from the generators of Python and numpy when they are imported
        if "numpy" not in key and "python" not in key:
            assert torch.equal(x, evaluated[key]), key


# ----------------------------------------------- a learnt temperature -----------------------------
LEARNT = {"temo": "--baseline", TS: "--baseline", "mmts": "--baseline --clusters none"}


@each_script
def test_learnt_tau_is_logged_as_the_step_used_it_and_does_not_decay(name, tmp_path):
    flags = f"{LEARNT.get(name, '')} --learnable-tau --max-steps 2 --lr 0.1 --weight-decay 0.3"
    script = importlib.import_module(name)
    log = few_steps(
        script, tmp_path / "run", *flags.split(), "--save-every", 1, base=base_of(name))
    first_tau = 0.1
    if name == TS:
        first_tau = 0.2
    assert log[0]["tau"] == pytest.approx(first_tau, rel=1e-6)
    tau = tensors_of(tmp_path / "run", 1)["tau/log_tau"].exp().item()  # after the first step
    assert tau != pytest.approx(first_tau, rel=1e-3)
    assert log[1]["tau"] == pytest.approx(tau, rel=1e-6)
    saved = torch.load(tmp_path / "run" / "checkpoints" / "step_1.pt", weights_only=True)
    group = saved["optimizer"]["param_groups"][-1]
    assert group["weight_decay"] == 0 and len(group["params"]) == 1


# ----------------------------------------------- every flag acts ----------------------------------
ACTS = {  # (script, flags): flags, each of which changes the losses beside them
    ("temo", ""):
        "--tau .2, --tau-min .1, --tau-alpha .3, --row a, --row b, --row c, --row d, --row e, "
        "--row f, --detach-tau, --similarity cosine, --grad-augmented, --image-aug crop, "
        "--image-aug simclr, --loss infonce, --loss ts, --loss dystress, --loss dystress-shifted, "
        "--loss cwcl, --seed 1, --batch-size 8, --lr .1, --optimizer sgd, --optimizer adam, "
        "--lr-schedule constant, --lr-schedule linear, --lr-end .01, --warmup-fraction .5, "
        "--weight-decay 0, --betas .5 .98, --betas .9 .5, --grad-clip .01, --image-size 24, "
        "--frames 3, --text-length 5, --embed-dim 8, --image-stats imagenet, --clean-captions, "
        "--projection-bias, --mixed-precision bf16",
    ("temo", "--loss infonce"): "--learnable-tau",
    ("temo", "--loss infonce --learnable-tau --lr .1"): "--tau-clamp .099 .101",
    (TS, ""):
        "--loss moco, --schedule step, --schedule random, --schedule fixed, "
        "--schedule oscillating, --tau-min .2, --tau-max .5, --schedule coarse, "
        "--head-norm batch, --imbalance-ratio 2",
    (TS, "--imbalance-ratio 2"): "--split-seed 1",
    (TS, "--schedule fixed"): "--learnable-tau",
    (TS, "--loss moco --queue-size 64"): "--queue-size 32, --momentum .5",
    (TS, "--weight-decay .9"): "--decay-all",
    ("mmts", ""):
        "--alpha .02, --shift-min .06, --shift-max .2, --periods 1.5, --num-clusters 5, "
        "--no-schedule, --no-shifts, --baseline, "
        "--loss max-margin --alpha .2 --shift-min .1 --shift-max .3",
    ("mmts", "--clusters verb"): "--clusters noun",
    ("mmts", "--no-shifts"): "--tau .2, --no-schedule",
    ("mmts", "--baseline --loss max-margin"): "--margin .3",
    ("mmts", "--baseline"): "--learnable-tau",
    ("ncl", ""):
        "--loss infonce, --learnable-tau, --iterations 1, --tau .2, --eps .1, --unfold-captions",
    ("mama", "--a0 8"):
        "--weighting joint, --weighting focal, --weighting spl, --weighting l2rw, "
        "--weighting none, --margin-schedule constant, --a0 4, --a1 20, --a2 1, --tau .2, "
        "--meta-lr .1, --meta-size 9, --meta-batch-size 4, --meta-every 2, --meta-set val, "
        "--learnable-tau, --weight-hidden 5, --caption-noise .9",
    ("mama", ""): "--baseline, --margin-schedule none"}


def cases_of_acts():
    cases = []
    for (script, words), flags in ACTS.items():
        cases += [(script, words, flag) for flag in flags.split(", ")]
    return cases


@pytest.fixture(scope="module")
def losses_of(tmp_path_factory):
    """Function of a script and flags -> losses of three steps, once for each."""

    @functools.cache
    def run(name, words):
        base = [*base_of(name), "--max-steps", "3"]
        folder = tmp_path_factory.mktemp("acts") / "run"
        with contextlib.redirect_stdout(io.StringIO()):
            few_steps(importlib.import_module(name), folder, *words.split(), base=base)
        return losses(folder)

    return run


@pytest.mark.parametrize("name, words, flag", cases_of_acts())
def test_every_flag_acts(losses_of, name, words, flag):
    without = losses_of(name, words)
    assert len(without) == 3
    assert losses_of(name, f"{words} {flag}") != without


# ----------------------------------------------- a choice without a branch ------------------------
@each_script
def test_a_choice_without_a_branch_is_an_error(name, tmp_path):
    """Adding a loss touches the list and the branch; without the branch nothing else is trained."""
    choice = "loss"
    if name == "mama":
        choice = "weighting"
    script = importlib.import_module(name)
    words = [*base_of(name), "--output-dir", str(tmp_path), "--max-steps", "1"]
    args = script.parse_args(words)
    setattr(args, choice, "sigmoid")
    with pytest.raises(ValueError, match=f"^--{choice} sigmoid has no branch"):
        script.main(args)


# ----------------------------------------------- views --------------------------------------------
JITTER = "--crop-min .3 --flip .1 --jitter .2"
JITTERED = dict(scale_min=0.3, flip=0.1, jitter_p=1, brightness=0.2, contrast=0.2, saturation=0.2)
STRONG = dict(
    scale_min=0.6, flip=0.7, jitter_p=0.8, brightness=0.15, contrast=0.15, saturation=0.15,
    hue=0.45, grey=0.55, blur=0.65)
SIMCLR = STRONG | dict(grey=0.2, brightness=0.4, contrast=0.4, saturation=0.4)
VIEWS = {  # script: flags, views
    "ncl": (JITTER, [JITTERED]),
    "mama": (JITTER, [JITTERED]),
    "mmts": (f"{JITTER} --randaugment 1 5", [JITTERED | dict(randaugment=(1, 5))]),
    TS: (
        "--crop-min .6 --flip .7 --jitter-p .8 --jitter .15 --hue .45 --grey .55 --blur .65",
        [STRONG, STRONG]),
    "temo": (
        f"{JITTER} --randaugment 1 5 --image-aug simclr --aug-crop-min .6 --aug-flip .7 "
        "--aug-hue .45 --aug-blur .65",
        [JITTERED | dict(jitter_p=0.8, randaugment=(1, 5)), SIMCLR])}


@pytest.fixture
def views_of(tmp_path, monkeypatch):
    """Function of a script's name and flags -> its views, as dicts."""
    dicts = []

    def note_and_stop(run, views, *_):
        dicts.extend(map(vars, views))
        raise SystemExit

    def views_of_run(name, flags):
        script, words = importlib.import_module(name), [*flags.split(), "--image-size", 24]
        with pytest.raises(SystemExit):
            run_script(script, tmp_path / "run", *words, base=base_of(name))
        return dicts

    monkeypatch.setattr(Run, "batches", note_and_stop)
    return views_of_run


@each_script
def test_each_strength_of_a_view_is_that_of_its_own_flag(name, views_of):
    flags, views = VIEWS[name]
    defaults = dict(size=24, hue=0, grey=0, blur=0, randaugment=(0, 0), squash=False)
    assert views_of(name, flags) == [defaults | view for view in views]


@pytest.mark.parametrize("name, words, flips", [
    ("temo", "", [0.3, 0.3]),
    ("temo", "--image-aug crop", [0.3, 0]),
    ("temo", "--row e", [0.3]),
    ("variants.slip", "--aug-flip 0.1", [0.3, 0.1, 0.1])])
def test_the_views_of_losses(name, words, flips, views_of):
    assert [view["flip"] for view in views_of(name, f"--flip 0.3 {words}")] == flips
