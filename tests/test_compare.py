"""Comparisons: statistics by hand, alternatives chosen on val alone, finished runs, claims."""

import math
from pathlib import Path

from benchmarks import compare
from contrastive.core.processes import UserError

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
CLAIMS = str(ROOT / "benchmarks" / "claims.txt")

# Its R@1 on test is 50 + 10 tau + noise by seed, less some 20 with --worse; on val it is the
# opposite, so that val prefers the lowest tau.
FORK = """
import argparse, json, pathlib
def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    for name, kind in dict(seed=int, split_seed=int, tau=float).items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=0)
    for name in ("--output-dir", "--run-name", "--dataset"):
        parser.add_argument(name)
    parser.add_argument("--worse", action="store_true")
    return parser.parse_args(argv)
if __name__ == "__main__":
    a = parse_args()
    with open("calls", "a") as f:
        f.write(f"{a.seed} {a.split_seed} {a.tau} {a.worse}\\n")
    assert (a.seed, a.worse, a.dataset) != (1, True, "bad"), "no"
    value = 50 + 10 * a.tau + (a.seed + a.split_seed) % 3 * (1 + a.worse / 10) - 20 * a.worse
    ranks = {"R@1": value, "MdR": 100 - value}
    test = {"set": {"images": 40, "modality_gap": 1.0, "text_to_image": ranks}}
    val = {"set": {"text_to_image": {"R@1": -value, "MdR": value}}}
    out = pathlib.Path(a.output_dir, a.run_name)
    out.mkdir()
    summary = dict(steps=3, wall_s=1.0, commit="c", val=val, test=test)
    (out / "summary.json").write_text(json.dumps(summary))
"""
PAIR = ["mine.py", "mine.py --worse"]


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """The current folder has mine.py."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FORK)


def calls():
    """The lines that mine.py left, one a run."""
    path = Path("calls")
    if not path.exists():
        return []
    return path.read_text().splitlines()


# ------------------------------------------- statistics --------------------------------------
def test_the_interval_is_student_s():
    """By hand: mean ± t s / sqrt(n), and p of the t distribution."""
    differences = [0.5, 2.0, -0.3, 1.1, 0.9]
    mean, half, p = compare.student(differences)
    error = np.std(differences, ddof=1) / math.sqrt(5)
    assert mean == pytest.approx(np.mean(differences))
    assert half == pytest.approx(stats.t.ppf(0.975, 4) * error)
    assert p == pytest.approx(2 * stats.t.sf(mean / error, 4))


@pytest.mark.parametrize("differences", [[1.0], [1.0, 1.0], [10.35 - 10.3, 10.25 - 10.2]])
def test_without_a_spread_there_is_no_evidence(differences):
    """One pair; pairs that are all alike, also but for rounding."""
    _, half, p = compare.student(differences)
    assert (half, p) == (math.inf, 1)


@pytest.mark.parametrize("p_values, family, corrected", [
    ([0.03, 0.001, 0.028, 0.6, 0.7], 0, [0.112, 0.005, 0.112, 1, 1]),
    ([0.01, 0.02], 5, [0.05, 0.08]),
    ([0.01, 0.02], 1, [0.02, 0.02]),
])
def test_holm_s_correction(p_values, family, corrected):
    """5 times the lowest p, 4 times the next; a higher p is never corrected to a lower one."""
    assert compare.holm(p_values, family) == pytest.approx(corrected)


@pytest.mark.parametrize("metric, mean, p, verdict", [
    ("text_to_image/R@1", 2, 0.02, "better"),
    ("text_to_image/R@1", -2, 0.02, "worse"),
    ("text_to_image/R@1", 2, 0.06, "open"),
    ("text_to_image/MdR", -2, 0.02, "better"),
    ("normalize/none/error/text_to_image", 2, 0.02, "worse"),
    ("modality_gap", -2, 0.02, "better"),
])
def test_the_three_verdicts(metric, mean, p, verdict):
    claim = compare.Claim(None, None, metric)
    comparison = compare.Comparison(claim, (), (), [], mean, 1.0, p)
    compare.judge([comparison])
    assert comparison.verdict == verdict


# -------------------------------------------- commands ---------------------------------------
@pytest.mark.parametrize("words, message", [
    (["mine.py", "mine.py --tua 3"], "in the command: mine.py --seed 0 --tua 3"),
    (["mine.py", "other.py"], "there is no script other.py"),
    (["mine.py", "mine.py --seed 3"], "leave --seed out"),
    (["mine.py", "mine.py  --dataset a", "mine.py --dataset 'a'"], "is given twice"),
    (["mine.py", "mine.py {--a|--b} {--c|--d}"], "more than one pair of braces, or half of one"),
    (["mine.py", "mine.py {--a"], "more than one pair of braces, or half of one"),
    (["mine.py", "mine.py {--tau 1|--tau x}"], "in the command: mine.py --seed 1000 --tau x"),
])
def test_commands_are_read_before_the_first_run(fork, words, message):
    with pytest.raises(UserError, match=message):
        compare.main(words)
    assert not calls()


def test_an_unknown_metric_ends_the_program_after_the_first_run(fork):
    message = (
        "metric modality_gap: the nearest: text_to_image/[RM].*; not in the val results of .*, "
        "which have text_to_image/R@1, ")
    with pytest.raises(UserError, match=message):
        compare.main(["mine.py {--tau 1|--tau 2}", "mine.py", "--metric", "modality_gap"])
    assert len(calls()) == 1


# ---------------------------------------------- runs -----------------------------------------
def test_compare_runs_pairs_and_writes_a_table_and_a_picture(fork, capsys):
    compare.main([*PAIR, "--seeds", "2", "--out", "out", "--also", "text_to_image/MdR"])
    assert sorted(calls()) == ["0 0 0 False", "0 0 0 True", "1 0 0 False", "1 0 0 True"]
    (path,) = Path("out").glob("*.md")
    table = path.read_text()
    line = "| `mine.py --worse` 30.55 | `mine.py` 50.50 | 2 | -19.95 ± 0.64 | worse |"
    assert line in table
    assert line in capsys.readouterr().out
    assert "| text_to_image/MdR | 49.50 ± 0.71 | 69.45 ± 0.78 |" in table
    (picture,) = Path("out").glob("*.png")
    assert picture.stat().st_size > 5000


def test_compare_goes_on_with_what_is_missing_of_the_same_code(fork):
    words = [*PAIR, "--seeds", "2", "--out", "out"]
    compare.main(words)
    runs = Path("out/runs.jsonl")
    runs.write_text("".join(runs.read_text().splitlines(keepends=True)[:3]))
    compare.main(words)
    assert len(calls()) == 4 + 1
    Path("mine.py").write_text(FORK + "# edited")
    compare.main(words)
    assert len(calls()) == 4 + 1 + 4


@pytest.mark.parametrize("flag", ["captions.csv", "--dataset=captions.csv"])
def test_an_edited_file_of_a_command_is_another_state(fork, flag):
    file = Path("captions.csv")
    file.write_text("image,caption\n")
    before = compare.state_of_code(["mine.py", flag])
    assert compare.state_of_code(["mine.py", flag]) == before
    file.write_text("image,caption\na.jpg,a\n")
    assert compare.state_of_code(["mine.py", flag]) != before


def test_val_chooses_on_seeds_of_its_own(fork, capsys):
    """Val is best where test is worst: the lowest tau is chosen. Pairs are over another flag."""
    commands = [f"{command} {{--tau 0.3|--tau 0.1}}" for command in PAIR]
    compare.main([*commands, "--vary", "split-seed", "--seeds", "2", "--tuning-seeds", "1"])
    tuning = []
    pairs = []
    for is_worse in (False, True):
        tuning += [f"0 1000 0.1 {is_worse}", f"0 1000 0.3 {is_worse}"]
        pairs += [f"0 0 0.1 {is_worse}", f"0 1 0.1 {is_worse}"]
    assert sorted(calls()[:4]) == sorted(tuning)
    assert sorted(calls()[4:]) == sorted(pairs)
    output = capsys.readouterr().out
    assert "text_to_image/R@1 on val: `--tau 0.3` -54.00, `--tau 0.1` -52.00" in output
    assert "| `mine.py --worse --tau 0.1` 31.55 | `mine.py --tau 0.1` 51.50 | 2 |" in output


def test_a_failed_run_names_its_command_and_leaves_its_pair_out(fork, capsys):
    with pytest.raises(UserError, match="^1 runs failed"):
        compare.main([*PAIR, "--dataset", "bad", "--seeds", "3"])
    output = capsys.readouterr().out
    assert "failed (1): mine.py --seed 1 --worse --dataset bad" in output
    assert "| `mine.py --worse` 31.10 | `mine.py` 51.00 | 2 |" in output  # seeds 0 and 2


# ------------------------------------------ stored claims ------------------------------------
def test_the_table_of_results_is_that_of_the_stored_runs(capsys, tmp_path):
    """Without a run."""
    compare.main(["--claims", CLAIMS, "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) > 80
    assert "\n".join(table) in (ROOT / "docs" / "results.md").read_text(encoding="utf8")
    assert not [*tmp_path.iterdir()]


def test_a_claim_without_stored_runs_runs_and_has_a_new_verdict(fork, capsys):
    Path("claims.txt").write_text(
        "# a comment\n"
        "flags | --dataset own.csv\n"
        "method | ours | text_to_image/R@1 | mine.py {--tau 0.3|--tau 0.1}\n"
        "method | others | text_to_image/R@1 | mine.py --worse\n"
        "method | alike | text_to_image/R@1 | mine.py --tau 1\n"
        "claim | one | a paper | ours is better | - | ours | others: worse; alike: better\n"
        "claim | two | a paper | ranks | text_to_image/MdR | ours | others: open\n")
    compare.main(["--claims", "claims.txt", "one", "--seeds", "2", "--tuning-seeds", "1"])
    output = capsys.readouterr().out
    line = "| ours `--tau 0.1` 51.50 | others 30.55 | 2 | +20.95 ± 0.64 | better |"
    assert f"| ours is better (a paper): text_to_image/R@1 {line}" in output
    assert "| alike 60.50 | 2 | -9.00, all pairs alike | open |" in output
    assert len(calls()) == 8
    with pytest.raises(UserError, match="has no claim three"):
        compare.main(["--claims", "claims.txt", "three"])
