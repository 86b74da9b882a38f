"""tools.check: two forks made from docs/forking.md keep the promises, three faults planted in them do not."""

import importlib
import re
from pathlib import Path

import pytest

from tools import check

ROOT = Path(__file__).resolve().parent.parent
TINY = "--dataset moving-emoji --clips 32 8 8 --frames 2 --embed-dim 8 --batch-size 8".split()
FLAGS = {"margin": TINY, "memory": [*TINY, "--weighting", "none", "--tau", "0.1"]}
OF_FIVE = [("temo", ""), ("temo", "--loss slip"), ("temperature_schedules", "--schedule fixed --learnable-tau"),
           ("temperature_schedules", "--loss moco --queue-size 32"), ("temperature_schedules", "--loss sdclr"),
           ("ncl", "--learnable-tau --queue-size 32"), ("mmts", "--num-clusters 4"),
           ("mmts", "--clusters none --no-schedule --no-shifts --learnable-tau"),
           ("mama", "--meta-size 8 --meta-batch-size 4 --meta-every 2 --learnable-tau --tau .5")]
FAULTS = {  # what is planted into a fork, and the line that must say so: fork, old, new, line
    "a local variable as state": ("memory", 'own["memory"]', "memory", "kill and resume"),
    "a missing gather": ("memory", "texts = gather(normalize(text))", "texts = normalize(text)", "two processes"),
    "a mean of the wrong axis": ("margin", "(logits - lower)", "(logits - logits.mean(0) - lower)", "two processes")}


def made(name, folder, old="", new=""):
    """The path of a fork of tests/forks, made of the script as it is now, that says `new` where it would say `old`."""
    fork = importlib.import_module(f"forks.{name}")
    text = (ROOT / fork.SCRIPT).read_text(encoding="utf8")
    for before, after in fork.CHANGES:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    assert old in text
    path = folder / f"{name}.py"
    path.write_text(text.replace(old, new) if old else text, encoding="utf8")
    return path


def lines(path, flags, capsys):
    """(exit code, {promise: its line}) of a check."""
    code = check.main([str(path), *flags])
    said = capsys.readouterr().out
    return code, {name: re.search(rf"^  {name} .*(\n {{19}}.*)?", said, re.M)[0] for name in check.LOOK}


@pytest.mark.parametrize("name", FLAGS)
def test_a_fork_of_the_docs_keeps_the_promises(name, tmp_path, capsys):
    code, said = lines(made(name, tmp_path), FLAGS[name], capsys)
    assert code == 0 and not any("DIFFERS" in line for line in said.values())
    assert all(f"{word} " in said["two processes"] for word in check.MOST)                 # numbers of own, too
    assert "losses 0e+00 (at most 0), tensors 0e+00 (at most 0)" in said["kill and resume"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_said_where(fault, tmp_path, capsys):
    name, old, new, red = FAULTS[fault]
    code, said = lines(made(name, tmp_path, old, new), FLAGS[name], capsys)
    assert code == 1 and {promise for promise, line in said.items() if "DIFFERS" in line} == {red}, said


@pytest.mark.parametrize("script, words", OF_FIVE)
def test_the_five_keep_them(script, words, capsys):
    """Two optimisers, queues, MoCo's keys, masks, clusters, learnt taus; MoCo and a look ahead refuse chunks."""
    code, said = lines(ROOT / f"{script}.py", [*TINY, *words.split()], capsys)
    left_out = "left out; error: --chunk-size" in said["chunks"]
    assert code == 0 and left_out == (script == "mama" or "moco" in words), said
    assert ("own " in said["two processes"]) == any(word in words for word in ("learnable", "slip", "moco"))


def test_what_is_no_script_is_refused_in_one_line():
    with pytest.raises(ValueError, match="no such script"):
        check.main(["nowhere.py"])
