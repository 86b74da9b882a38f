"""Two processes, chunks, a kill -9 and SIGTERM give the run of one process, for every script and
variant; eval.py gives the numbers of its training.

The runs are those of tools.check, forks of this process. What bears the mark `full` runs in
.ci/full alone.
"""

import functools
import importlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from contrastive.core.files import flatten, read_json

import pytest

import launch
from helpers import evaluated, write_clip_features
from tools import check

ROOT = Path(__file__).resolve().parent.parent
CLIPS = "--dataset moving-emoji --clips 32 8 8 --frames 2"
SMALL = "--cpu --embed-dim 8 --batch-size 8"
META = "--meta-size 8 --meta-batch-size 4 --meta-every 2"


class Program(NamedTuple):
    """A script or variant with flags of a small run; {NAME} in them is a file of the tests."""

    module: str
    flags: str = ""
    data: str = CLIPS
    has_state: bool = False  # something beside the encoders changes in a step
    has_chunks: bool = True  # False: it refuses --chunk-size


ALWAYS = {
    "temo": Program("temo"),
    "ts, moco": Program(
        "temperature_schedules", "--loss moco --queue-size 32", has_state=True),
    "ncl": Program("ncl", "--learnable-tau --queue-size 32", has_state=True),
    "mmts": Program("mmts", "--num-clusters 4"),
    "mama": Program(
        "mama", f"{META} --learnable-tau --tau .5", has_state=True, has_chunks=False)}
IN_FULL_ALONE = {
    "temo, learnt tau": Program("temo", "--baseline --learnable-tau", has_state=True),
    "temo, frozen": Program("temo", "--freeze both --feature-cache {cache}"),
    "ts": Program("temperature_schedules", "--period 3", has_state=True),
    "ts, learnt tau": Program(
        "temperature_schedules", "--baseline --learnable-tau", has_state=True),
    "mmts, learnt tau": Program(
        "mmts", "--baseline --clusters none --learnable-tau", has_state=True),
    "mmts, margin": Program(
        "mmts", "--num-clusters 4 --loss max-margin --alpha .2 --shift-min .1 --shift-max .3"),
    "slip": Program("variants.slip", has_state=True),
    "temo_experts": Program(
        "variants.temo_experts", "--image-expert {dino} --text-expert {bert}"),
    "sdclr": Program("variants.sdclr", "--head-norm none", has_state=True),
    "ncl_ssb": Program(
        "variants.ncl_ssb",
        "--text-encoder {t5} --text-length 12 --embed-dim 16 --dropout 0 --no-text-dropout "
        "--queue-size 40 --unfold-captions --lr .001",
        data="--dataset {clips} --feature-dir {motion} {appearance} --frames 5",
        has_state=True),
    "mmts_vast": Program(
        "variants.mmts_vast",
        "--image-encoder vast-small --image-size 32 --embed-dim 24 --matching-weight 1 --baseline "
        "--clusters none --learnable-tau --lr .01",
        has_state=True),
    "mama_qa": Program(
        "variants.mama_qa", f"--task qa-open {META}", has_state=True, has_chunks=False),
    "mama_qa, choices": Program("variants.mama_qa", "--task qa-choice --weighting none")}
PROGRAMS = ALWAYS | IN_FULL_ALONE
each_program = pytest.mark.parametrize("name", [
    *ALWAYS, *(pytest.param(name, marks=pytest.mark.full) for name in IN_FULL_ALONE)])


class Measure(NamedTuple):
    """A run of one process, folder/one, beside which others run."""

    program: Program
    script: object  # its module
    flags: list
    folder: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory, tiny):
    """{name: path} of tiny encoders, and of 40 clips with two captions and two features each."""
    root = tmp_path_factory.mktemp("files")
    paths = write_clip_features(root) | {"cache": root / "cache"}
    for kind in ("dino", "bert", "t5"):
        paths[kind], _ = tiny(kind)
    return paths


@pytest.fixture(scope="module")
def measure_of(tmp_path_factory, files):
    """Function of a name of PROGRAMS -> its Measure, made once."""

    @functools.cache
    def measure(name):
        launch.own_children()
        program = PROGRAMS[name]
        folder = tmp_path_factory.mktemp("measure")
        script = importlib.import_module(program.module)
        words = f"{program.data} {SMALL} {program.flags}".format(**files)
        flags = [*check.SMALL, *words.split(), *check.FIXED, "--output-dir", str(folder)]
        job = check.Job(script, [*flags, "--run-name", "one"], folder / "one.log")
        code, output = check.run(job)
        assert code == 0, output
        return Measure(program, script, flags, folder)

    return measure


def kept(variant_name, measure, capsys):
    """Whether a run keeps a promise, and what tools.check says of it."""
    (variant,) = [variant for variant in check.VARIANTS if variant.name == variant_name]
    capsys.readouterr()
    is_kept = check.keeps_promise(variant, measure.script, measure.flags, measure.folder)
    return is_kept, capsys.readouterr().out


@each_program
def test_two_processes_are_one(name, measure_of, capsys):
    measure = measure_of(name)
    is_kept, output = kept("two processes", measure, capsys)
    assert is_kept, output
    assert ("state of the loss" in output) == measure.program.has_state, output


@each_program
def test_chunks_are_the_whole_batch(name, measure_of, capsys):
    measure = measure_of(name)
    is_kept, output = kept("chunks", measure, capsys)
    assert is_kept, output
    assert ("left out" in output) != measure.program.has_chunks, output


@each_program
def test_a_killed_run_goes_on_bitwise(name, measure_of, capsys):
    is_kept, output = kept("kill and resume", measure_of(name), capsys)
    assert is_kept, output


@each_program
def test_eval_repeats_the_numbers_of_training(name, measure_of):
    folder = measure_of(name).folder / "one"
    trained = flatten(read_json(folder / "summary.json")["test"])
    found = evaluated(folder)
    repeated = flatten({data: result["metrics"] for data, result in found.items()})
    assert trained == repeated


# what tools.check runs in a fork, in an interpreter of its own
IN_A_PROCESS = """
import importlib, sys
from pathlib import Path
from tools import check
module, log, number, *flags = sys.argv[1:]
job = check.Job(importlib.import_module(module), flags, Path(log), check.KILL_STEP, int(number))
check.run_process(0, job)
"""


@pytest.mark.parametrize("number, code", [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("name", [
    "temo", pytest.param("mama", marks=pytest.mark.full),
    pytest.param("mmts_vast", marks=pytest.mark.full)])
def test_a_signal_to_a_command_costs_nothing(name, number, code, measure_of):
    measure = measure_of(name)
    folder = measure.folder / f"stopped by {number.name}"
    words = [measure.program.module, f"{folder}.log", str(int(number)), *measure.flags]
    command = [sys.executable, "-c", IN_A_PROCESS, *words, "--run-name", folder.name]
    assert subprocess.run(command, cwd=ROOT).returncode == code
    resume = check.Job(measure.script, ["--resume", str(folder)], folder.with_suffix(".resumed"))
    assert check.run(resume)[0] == 0
    states = [check.read_state(measure.folder / run) for run in (folder.name, "one")]
    start = check.read_state(measure.folder / "one", check.SAVE_STEP)
    differences = check.differences(*states, start)
    assert differences["losses"] == differences["tensors"] == 0
