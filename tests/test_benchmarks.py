"""What the claims are decided by: paired intervals by hand, tuning on val alone, no run twice, flags that exist."""

import importlib
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

from contrastive import engine
from contrastive.engine.run import Run

import pytest
import torch

import eval as eval_py
import mama
import temo
from benchmarks import claims, cross, lengths, questions

CLAIM = {"says": "a beats b", "paper": "none", "flags": "", "metric": "R@1",
         "arms": {"a": ["temo.py --x 1", "temo.py --x 2"], "b": ["temo.py --y 1", "temo.py --y 2"]}}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """An empty results folder, and one claim."""
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    monkeypatch.setattr(claims, "CLAIMS", {"claim": CLAIM})
    (tmp_path / "claims").mkdir()
    return tmp_path


def write(command, val, test, **more):
    """The record of a command, whose metrics are given as R@1 or whole."""
    val, test = ({"set": x if isinstance(x, dict) else {"R@1": x}} for x in (val, test))
    record = {"command": "python " + " ".join(command), "commit": "c", "machine": "m", "versions": ["v"],
              "wall_s": 36.0, "val": val, "test": test} | more
    claims.file_of(command).write_text(json.dumps(record))


def parsed(words, **places):
    """The flags of a command as its script reads them."""
    parse_args = importlib.import_module(words[0].removesuffix(".py")).parse_args
    return parse_args([word.format(**places) for word in words[1:]])


@pytest.fixture
def places(tmp_path):
    """What stands in braces in commands."""
    (tmp_path / "tail.npy").touch()
    return {"fashion": ".", "tail": tmp_path / "tail.npy", "uniform": tmp_path / "tail.npy"}


def test_interval_and_power_by_hand():
    mean, half = claims.interval([1.0, 2.0, 3.0])
    assert mean == 2 and half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-5)  # t of 2 degrees, deviation 1
    assert claims.interval([4.0]) == (4.0, math.inf)
    # 5 pairs: t 2.776445 and 0.940965 of 4 degrees; the pilot's deviation is sqrt(2)
    assert claims.smallest_effect([0.0, 2.0], 5) == pytest.approx((2.776445 + 0.940965) * math.sqrt(2 / 5), rel=1e-5)
    assert claims.smallest_effect([1.0], 5) == math.inf


@pytest.mark.parametrize("mean, half, words", [(2, 1, "held"), (-2, 1, "not held: the baseline is better"),
                                               (0.5, 1, "no difference above 1.5"),
                                               (-1, 1.3, "no difference above 2.3"), (0.5, 2, "not decidable here")])
def test_verdicts(mean, half, words):
    assert claims.verdict(mean, half) == words


def test_a_claim_is_tuned_on_val_and_decided_on_test(results):
    what = ("claim", "full", 2, 3)
    assert claims.judge(*what) is None and len(claims.work_left(["claim"], *what[1:])) == 4  # the trials alone
    commands, _ = claims.runs_of(*what)
    for arm, best in (("a", 1), ("b", 0)):
        for k, seeds in enumerate(commands[arm]):
            write(seeds[0], val=10 + (k == best), test=99 - 50 * (k == best))  # test would choose the other trial
    left = claims.work_left(["claim"], *what[1:])
    assert left == commands["a"][1][1:] + commands["b"][0][1:]
    for k, (a, b) in enumerate(zip(commands["a"][1][1:], commands["b"][0][1:])):
        write(a, val=0, test=12.0 + k)
        write(b, val=0, test=10.0 + 2 * k)
    assert not claims.work_left(["claim"], *what[1:])
    result = claims.judge(*what)
    found = result["against"]["b"]
    assert found["differences"] == [2.0, 1.0, 0.0] and found["mean"] == 1 and found["seeds"] == [0, 1, 2]
    assert result["arms"]["a"]["flags"].endswith("--x 2") and result["verdict"] == "not decidable here"
    table = claims.write_tables(["claim"], *what[1:])
    assert "| a beats b | none | a 13.0 | b 12.0 | 3 | +1.0 ± 2.5 |" in table
    assert (results / "claims" / "claim.png").is_file() and "claim" in json.loads((results / "claims.json").read_text())


@pytest.mark.parametrize("program, flags", [(claims, ["--trials", "2"]), (lengths, ["--lengths", "3", "10"])])
def test_what_is_missing_is_run_and_what_fails_is_not_tried_again(results, monkeypatch, program, flags):
    """Both trials of b fail; those of a and what follows from them (two seeds, or two rates) end well."""
    tried = []

    def run(words, places, keep):
        tried.append(words)
        if "--x" in words:
            write(words, val=1.0, test=1.0)
            return claims.record_of(words)
    monkeypatch.setattr(claims, "run", run)
    with pytest.raises(SystemExit, match="^2 runs failed; see above"):
        program.main(["--claims", "claim", "--seeds", "2", "--jobs", "2", *flags])
    assert len(tried) == len({str(words) for words in tried}) == 6 and sum("--y" in words for words in tried) == 2


def test_a_row_compares_the_same_seeds_and_goes_with_its_claim(results, monkeypatch):
    what = ("claim", "full", 1, 3)
    commands, _ = claims.runs_of(*what)
    for k, (a, b) in enumerate(zip(commands["a"][0][1:], commands["b"][0][1:])):
        write(a, val=0, test=10.0 + k)
        if k < 2:
            write(b, val=0, test=10.0)
    assert "| a 10.5 | b 10.0 | 2 | +0.5 " in claims.write_tables(["claim"], *what[1:])  # not a 11.0, of three seeds
    assert "| a 10.5 | b 10.0 | 2 | +0.5 " in claims.write_tables([], *what[1:])  # the row of an earlier call
    assert claims.write_tables([], *what[1:]).endswith("\nCommits c; m.\n")
    monkeypatch.setattr(claims, "CLAIMS", {"other": CLAIM})
    assert "a beats b" not in claims.write_tables([], *what[1:])


def test_all_directions_are_reported_beside_the_one_that_decides(results, monkeypatch):
    """Differences by hand; InfoNCE's from its own similarities, whose numbers stand below normalize/none."""
    plain = "normalize/none/" + claims.T2V
    claim = CLAIM | {"metric": claims.T2V, "arms": {"a": ["temo.py --x 1"], "b": (plain, ["ncl.py --y 1"])}}
    monkeypatch.setattr(claims, "CLAIMS", {"claim": claim})
    commands, _ = claims.runs_of("claim", "full", 1, 2)
    for k in range(2):
        for arm, shift in (("a", 5.0), ("b", 0.0)):
            numbers = {"text_to_image": {"R@1": 10.0 + shift, "R@10": 50.0 + shift * k},
                       "image_to_text": {"R@1": 10.0 - shift, "R@10": 50.0}}
            test = {"normalize": {"none": numbers}} if arm == "b" else numbers
            write(commands[arm][0][1 + k], test, test)
    table = claims.write_tables(["claim"], "full", 1, 2)
    row = "| claim: a | b | **+5.0 ± 0.0** | +2.5 ± 31.8 | **-5.0 ± 0.0** | +0.0 ± 0.0 |  |  |  |"
    assert row in table and row in claims.write_tables([], "full", 1, 2)
    for file in (claims.file_of(c) for c in commands["b"][0][1:]):  # a metric that one script has not is left out
        record = json.loads(file.read_text())
        del record["test"]["set"]["normalize"]["none"]["image_to_text"]
        file.write_text(json.dumps(record))
    assert "| claim: a | b | **+5.0 ± 0.0** | +2.5 ± 31.8 |  |  |  |" in claims.write_tables(["claim"], "full", 1, 2)


def test_a_metric_that_is_not_there_and_a_folder_that_is_not_there(results, monkeypatch):
    with pytest.raises(SystemExit, match=r"R@5: not in the val results of python temo.py"):
        claims.number({"command": "python temo.py", "val": {"set": {"R@1": 1.0}}}, "val", "R@5")
    monkeypatch.setattr(claims, "CLAIMS", {"tail": CLAIM | {"arms": {"a": ["temo.py --data-dir {fashion}"]}}})
    with pytest.raises(SystemExit, match="--fashion nowhere: no such folder, and tail need it"):
        claims.main(["--fashion", "nowhere"])


def test_cross_evaluates_a_run_with_and_without_biases_at_one_gamma(results, tmp_path, monkeypatch):
    """A real run of another tau; what is kept of other flags is not taken."""
    monkeypatch.setattr(claims, "subprocess", SimpleNamespace(  # eval.py, in this process
        run=lambda words, **_: eval_py.main(eval_py.parse_args(words[2:])), DEVNULL=None))
    words = ["temo.py", *"--dataset moving-emoji --clips 24 8 8 --image-size 16 --frames 2 --batch-size 8".split(),
             *"--max-steps 1 --eval-every 0 --loss infonce --tau 0.05".split()]
    file = claims.file_of(words)
    temo.main(temo.parse_args([*words[1:], "--cpu", "--output-dir", str(tmp_path / "keep"), "--run-name", file.stem]))
    kept = file.with_name(f"{file.stem}.normalized.json")
    kept.write_text(json.dumps({"command": "of another gamma"}))
    assert cross.evaluation(words, "") is None
    numbers = cross.evaluation(words, tmp_path / "keep")
    assert set(cross.COLUMNS.values()) < set(numbers) and numbers["command"].endswith("--gamma 0.1")
    assert cross.evaluation(words, "") == numbers  # from its file
    with pytest.raises(SystemExit, match="no seed for which every row has a run"):
        cross.table({"a": {0: numbers}, "b": {1: numbers}})
    assert cross.table({"a": {0: numbers, 1: numbers}, "b": {1: numbers}}).count("| 1 |") == 2


def test_results_are_no_changes_of_the_code(tmp_path, monkeypatch):
    """Tables are rewritten while runs are made: their records must still name a clean commit."""
    for name in ("benchmarks/results/claims.md", "temo.py", "contrastive/engine/log.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(engine.log, "__file__", str(tmp_path / "contrastive" / "engine" / "log.py"))
    (tmp_path / "benchmarks/results/claims.md").write_text("after")
    assert len(engine.log.commit()) == 12
    (tmp_path / "mine.py").write_text("a fork that git does not know")
    for script, changed in (("temo.py", False), ("mine.py", True)):
        monkeypatch.setattr(sys, "argv", [str(tmp_path / script)])
        assert engine.log.commit().endswith("+changes") == changed
    monkeypatch.undo()
    monkeypatch.setattr(engine.log, "__file__", str(tmp_path / "contrastive" / "engine" / "log.py"))
    (tmp_path / "temo.py").write_text("after")
    assert engine.log.commit().endswith("+changes")


def test_every_claim_names_flags_that_its_script_has(places):
    for name in claims.CLAIMS:
        for suite in ("quick", "full", "gpu"):
            commands, metrics = claims.runs_of(name, suite, 3, 1)
            trials = {len(of_arm) for of_arm in commands.values()}
            assert len(trials) == 1 and all(metrics.values()), name  # tuned alike
            asked = [(metrics[arm], vars(parsed(seeds[0], **places))) for arm in commands for seeds in commands[arm]]
            assert all(a != b for k, a in enumerate(asked) for b in asked[:k]), name  # no trial is another in disguise
            for command in (seeds[0] for of_arm in commands.values() for seeds in of_arm):
                args = parsed(command, **places)
                if suite == "gpu":
                    assert args.image_encoder == "resnet18-cifar" and not args.index_file or args.frames == 8
                assert args.max_steps == (3 if suite == "quick" else 0)


def test_claims_on_other_data(results, monkeypatch, capsys):
    """The flags of --own stand where moving-emoji's stood; results have files of their own."""
    claim = CLAIM | {"flags": claims.MOVING, "arms": {"a": ["temo.py"], "b": ["temo.py --loss infonce"]}}
    monkeypatch.setattr(claims, "CLAIMS", {"claim": claim, "zipf": claim | {"flags": claims.MOVING + " --x"}})
    monkeypatch.setattr(claims, "OWN", "")
    before = claims.runs_of("claim", "full", 1, 1)[0]["a"][0][0]
    claims.main(["--own", "--dataset own.csv --epochs 3", "--plan", "--trials", "1", "--seeds", "2"])
    after = claims.runs_of("claim", "full", 1, 1)[0]["a"][0][0]
    assert before[3:5] == ["--dataset", "moving-emoji"] and after[3:] == ["--dataset", "own.csv", "--epochs", "3"]
    assert "on --dataset own.csv --epochs 3: claim\n" in capsys.readouterr().out
    assert not list(results.glob("claims*.*"))  # a plan writes nothing
    claims.write_tables(["claim"], "full", 1, 2)
    assert (results / "claims_own.md").is_file() and not (results / "claims.md").exists()


def test_claims_on_other_data_without_its_metric_or_of_other_data_still(results, monkeypatch, capsys):
    """kNN needs classes; a row of the data before is dropped, and the file says which data these are."""
    claim = CLAIM | {"flags": claims.MOVING, "arms": {"a": ["temo.py"], "b": ["temo.py --loss infonce"]}}
    both = {**claim, "arms": {"a": ["mama.py --caption-noise 0"], "b": ["ncl.py"]}}
    monkeypatch.setattr(claims, "CLAIMS", {"claim": claim, "knn": claim | {"read": "knn@1"}, "both": both})
    monkeypatch.setattr(claims, "OWN", "")
    monkeypatch.setattr(claims, "run", lambda words, *_: write(words, val=1.0, test=1.0) or claims.record_of(words))
    flags = ["--trials", "1", "--seeds", "2", "--jobs", "1"]
    claims.main(["--own", "--dataset a.csv", *flags])
    assert "knn: not judged, runs or their numbers are missing\n" in capsys.readouterr().out
    claims.main(["--own", "--dataset b.csv --epochs 2", "--claims", "claim", *flags])
    claims.main(["--own", "--dataset b.csv", "--claims", "knn", *flags])
    claims.main(["--own", "--dataset b.csv", "--claims", "both", *flags])
    table = (results / "claims_own.md").read_text()
    assert table.startswith("Data: `--dataset b.csv`") and "| a beats b |" not in table
    assert "--caption-noise" not in claims.command(both, "mama.py --caption-noise 0", "full", 0)
    assert "on --dataset b.csv: \n" in capsys.readouterr().out  # two scripts differ in more than the method


def test_a_claim_that_cannot_be_judged_keeps_its_row(results, capsys):
    commands, _ = claims.runs_of("claim", "full", 1, 2)
    for words in (c for arm in commands.values() for c in arm[0]):
        write(words, val=0, test=10.0)
    before = claims.write_tables(["claim"], "full", 1, 2)
    assert claims.write_tables(["claim"], "full", 2, 2) == before  # the second trial has no file
    assert "claim: not judged, runs or their numbers are missing; its row stays" in capsys.readouterr().out


def test_longer_runs_scale_what_is_counted_in_epochs_and_steps(places):
    """As each script reads its flags: epochs, warm-up, period and margin, for every claim; length 1 to the word."""
    for name, claim in claims.CLAIMS.items():
        counts = set()
        for arm in claim["arms"]:
            _, trials = lengths.trials_of(name, arm, 4)
            counts.add(len(trials))
            words = claims.command(claim, trials[0], "full", 0)
            assert lengths.words_of(name, (trials[0], 1), 1, 0) == words
            today, longer, twice = (
                parsed(of, **places) for of in (words, lengths.scaled(words, 10), lengths.scaled(words, 3, 2)))
            assert twice.epochs == 3 * today.epochs and twice.lr == 2 * today.lr and twice.lr_end == today.lr_end
            changed = {k for k, v in vars(today).items() if vars(longer)[k] != v} - {"changed"}
            margin = {"a2"} if words[0] == "mama.py" and today.margin_schedule != "none" else set()
            of_script = {"period"} if words[0] == "temperature_schedules.py" else margin
            assert changed == {"epochs", "warmup_epochs"} | of_script, name
            for key in changed:
                factor = 0.1 if key == "a2" else 10
                assert vars(longer)[key] == pytest.approx(factor * vars(today)[key]), (name, key)
        assert len(counts) == 1, name  # tuned alike
    for of_arm in claims.runs_of("ts-long-tail", "full", 3, 5)[0].values():  # a changed word would lose the runs there
        assert claims.record_of(lengths.scaled(of_arm[0][0], 1))


@pytest.mark.parametrize("points, words", [
    ([(310, 2, 1), (930, 3, 1)], "holds from 310 steps on"),
    ([(1692, 2, 1), (564, -3, 1), (5640, 3, 1)], "holds from 1,692 steps on"),
    ([(564, 3, 1), (1692, -1, 2), (5640, 3, 1)], "holds from 5,640 steps on"),
    ([(564, -3, 1), (1692, 0, 2), (5640, -2, 1)], "does not hold up to 5,640 steps"),
    ([(564, -3, 1), (5640, -0.5, 1)], "not decidable"), ([], "not decidable"),
    ([(564, 3, 1), (5640, -2, 1)], "held at 564 steps, lost at 5,640"),
    ([(310, 3, 1), (930, 2, 1), (3100, 0.1, 1.8)], "held at 930 steps, not decidable at 3,100"),
    ([(564, 3, 1), (5640, 1, math.inf)], "held at 564 steps, not decidable at 5,640")])
def test_verdicts_over_lengths(points, words):
    assert lengths.verdict(points) == words


def test_lengths_are_tuned_at_three_and_keep_the_choice(results, monkeypatch):
    """Trials, then rates of the best, then pairs; ten times as long with the same choice; one table and picture."""
    monkeypatch.setattr(lengths, "PAPER", {"claim": {"b": {"their data": 1.5}}})

    def record(words, val, test):
        write(words, val, test, steps=int(words[words.index("--epochs") + 1]) * 10)
    what = (2, [2.0], 3)
    assert lengths.hours("claim", 3, *what)[0] == 2 * (2 + 1 + 3)
    first = lengths.wanted("claim", 10, *what)
    assert [w[3:5] for w in first] == [["--x", "1"], ["--x", "2"], ["--y", "1"], ["--y", "2"]]
    assert all(w[5:] == ["--epochs", "30", "--warmup-epochs", "3"] and w[2] == "1000" for w in first)
    for k, words in enumerate(first):
        record(words, val=10 + (k in (1, 2)), test=99 - k)
    rates = lengths.wanted("claim", 3, *what)
    assert [w[3:5] + w[-2:] for w in rates if not claims.file_of(w).exists()] == [
        ["--x", "2", "--lr", "0.004"], ["--y", "1", "--lr", "0.004"]]
    for k, words in enumerate(rates):
        record(words, val=12 - 4 * k, test=0)  # better for a, worse for b
    for length in (3, 10):
        pairs = lengths.wanted("claim", length, *what)
        assert [w[2] for w in pairs] == list("001122") and all(w[6] == str(10 * length) for w in pairs)
        assert [w[-2:] == ["--lr", "0.004"] for w in pairs] == [True, False] * 3
        for k, words in enumerate(pairs):
            record(words, val=0, test=50 + k if k % 2 else 50 + k + length)
        assert not lengths.wanted("claim", length, *what)
    assert lengths.hours("claim", 3, *what)[0] == 0
    table = lengths.write_tables(["claim"], [3, 10], *what)
    assert "| a beats b | a - b | 300: +2.0 ± 0.0 (3) | 1,000: +9.0 ± 0.0 (3) | +1.5 their data | " in table
    assert table.endswith("| holds from 300 steps on |")
    kept = json.loads((results / "claims_lengths.json").read_text())["claim"]["lengths"]["10"]["arms"]["a"]
    assert [t["chosen"] for t in kept["tuning"]] == [False, False, True] and kept["flags"].endswith("--lr 0.004")
    assert (results / "claims_lengths" / "claim.png").is_file()
    assert "| claim | a | 300 | `--x 2 --lr 0.004`" in (results / "claims_lengths.md").read_text()


def test_rows_of_questions_name_flags_and_are_written(results):
    """Every row is parsed by mama.py; a table of two records has their means, and names what was not run."""
    wanted = questions.commands(2)
    with pytest.raises(SystemExit, match="no run has ended well"):
        questions.write(wanted)
    assert len(wanted) == 12
    for words in (words for of in wanted.values() for words in of):
        args = mama.parse_args(words[1:])
        assert args.task == words[words.index("--task") + 1] and args.eval_every == 0
    answers = {c: 40.0 for c in questions.COLUMNS.values()}
    for k, words in enumerate(wanted["qa-open", "no margin"]):
        write(words, answers, answers | {"accuracy": 50.0 + k}, chance={"set": answers})
    table = questions.write(wanted)
    assert "| qa-open | no margin | 2 | 50.5 ± 0.7 | 40.0 ± 0.0 |" in table and "qa-choice" not in table
    text = (results / "mama_qa_rows.md").read_text()
    assert text.startswith(table) and "Not run: qa-open, margin and weights (default); qa-open, no weights" in text


def test_gpu_steps_go_on_where_one_fails_and_skip_what_is_there(tmp_path):
    """gpu.sh with a stand-in for python, which leaves a file for each step but one."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$2" != nonsense ] && echo "$@" > "$4/$2.json"\n')
    python.chmod(0o755)
    command = ["bash", "benchmarks/gpu.sh", "--dry", "evaluation", "nonsense", "evaluation"]
    environment = os.environ | {"PYTHON": str(python)}
    done = subprocess.run(command, cwd=claims.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.endswith("failed, or longer than 540 s: nonsense\n"), done.stderr
    skipped, = (line for line in done.stdout.splitlines() if line.endswith("is there, skipped"))
    file = Path(skipped.split()[1])
    assert file.read_text() == f"benchmarks/gpu.py evaluation --results {file.parent} --dry\n"


def test_gpu_steps_leave_one_file_to_copy_and_one_to_read(tmp_path):
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text(f'#!/bin/sh\n[ "$1" = - ] && exec {sys.executable} "$@"\n'
                      'echo "words of $2"; echo "{\\"step\\": \\"$2\\"}" > "$4/$2.json"\n')
    python.chmod(0o755)
    environment, words = os.environ | {"PYTHON": str(python), "RESULTS": str(out)}, ["--dry", "views", "fp16"]
    subprocess.run(["bash", "benchmarks/gpu.sh", *words], cwd=claims.ROOT, env=environment, check=True)
    assert json.loads((out / "gpu.json").read_text()) == {"views": {"step": "views"}, "fp16": {"step": "fp16"}}
    assert (out / "gpu.txt").read_text() == "--- views\nwords of views\n\n--- fp16\nwords of fp16\n\n"


def test_gpu_steps_run_dry_and_leave_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    gpu = importlib.import_module("benchmarks.gpu")
    for step in ("evaluation", "losses", "views"):
        gpu.main([step, "--results", str(tmp_path), "--dry"])
    record = json.loads((tmp_path / "evaluation.json").read_text())
    assert record["command"] == "bash benchmarks/gpu.sh --dry evaluation" and record["cards"] == "none: a dry run"
    assert record["results"]["ranks"]["largest difference"] == 0 and record["results"]["ranks"]["card"]["seconds"] > 0
    losses = json.loads((tmp_path / "losses.json").read_text())["results"]["N = 64"]
    assert losses["temo, blocks"]["ratio"] == 1 and losses["nt_xent, whole"]["seconds"] > 0
    views = json.loads((tmp_path / "views.json").read_text())["results"]
    assert views["SimCLR, compiled"]["seconds"] > 0 and views["SimCLR"]["waits"] == 0

    set_lr = Run.set_lr

    def waiting(run, lr):  # as torch warns of each wait under set_sync_debug_mode("warn")
        set_lr(run, lr)
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    monkeypatch.setattr(Run, "set_lr", waiting)
    found = gpu.watch("temo", *gpu.TOY)
    assert found["waits_a_step"] == 1 and 0 < found["idle"] < 1 and found["samples_per_s"] > 0
    event = SimpleNamespace(device_type=torch.autograd.DeviceType.CPU, is_user_annotation=False)
    spans = [(0, 4), (1, 2), (6, 8), (7, 10)]  # one inside another, a gap of 2, an overlap
    events = [SimpleNamespace(time_range=SimpleNamespace(start=a, end=b), **vars(event)) for a, b in spans]
    assert gpu.idle(SimpleNamespace(events=lambda: events)) == pytest.approx(0.2)


def test_an_arm_may_be_read_by_a_metric_of_its_own():
    """NCL as the paper has it, with its queue, against InfoNCE as it is; both claims from the stored runs alone."""
    mean = {}
    for name in ("ncl-training", "ncl-paper", "ncl-error", "ncl-error-queue"):
        result = claims.judge(name, "full", 3, 5)
        (baseline, found), = result["against"].items()
        mean[name] = found["mean"]
        read = [result["arms"][arm]["metric"] for arm in (result["method"], baseline)]
        queue = "queue" if name in ("ncl-paper", "ncl-error-queue") else "none"
        assert [r.split("/")[1] for r in read] == [queue, "none"] and ("error" in read[0]) == ("error" in name)
    assert round(mean["ncl-training"], 1) == 3.4 and round(mean["ncl-paper"], 1) == -3.1
    assert round(mean["ncl-error"], 1) == -0.3 and round(mean["ncl-error-queue"], 1) == -16.9
