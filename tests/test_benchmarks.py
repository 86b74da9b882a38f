"""What decides a claim: statistics by hand, tuning on val alone, stored runs; rows of gpu.py."""

import importlib
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from contrastive import engine
from contrastive.core.files import flatten, read_json

import numpy as np
import pytest
import torch
from scipy import stats

from benchmarks import claims, compare, gpu, recipes, speed
from helpers import write_files

# A script that any other may stand beside: its test metric is 50 + 10 tau + noise by seed, less
# some 20 with --worse. With --odd the two have no seed in common.
FORK = """
import argparse, json, pathlib
p = argparse.ArgumentParser()
kinds = dict(seed=int, split_seed=int, tau=float, output_dir=str, run_name=str)
for name, kind in kinds.items():
    p.add_argument("--" + name.replace("_", "-"), type=kind, default=0)
for name in ("--worse", "--extra", "--odd"):
    p.add_argument(name, action="store_true")
p.add_argument("--dataset")
a = p.parse_args()
with open("calls", "a") as f:
    f.write(f"{a.seed} {a.split_seed} {a.tau} {a.worse}\\n")
assert (a.seed, a.worse, a.dataset) != (1, True, "bad"), "no"
assert not a.odd or a.seed == a.worse
value = 50 + 10 * a.tau + (a.seed + a.split_seed) % 3 * (1 + a.worse / 10) - 20 * a.worse
out = pathlib.Path(a.output_dir, a.run_name)
out.mkdir()
of = {"set": {"text_to_image": {"R@1": value, "MdR": 100 - value}}}
if a.extra:
    of["set"]["extra"] = 7
val = {"set": {"text_to_image": {"R@1": -value, "MdR": value}}}
numbers = dict(steps=3, wall_s=1.0, samples_per_s=1.0, peak_memory_mib=1.0, chance={})
(out / "summary.json").write_text(json.dumps(dict(numbers, commit="c", val=val, test=of)))
"""
PAIR = ["mine.py", "mine.py --worse"]


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """The current folder has mine.py."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FORK)


def calls():
    """The lines that mine.py left, one a run."""
    return Path("calls").read_text().splitlines()


def line_of(folder):
    """What a comparison found of its second command."""
    return read_json(Path(folder) / "comparison.json")["against"]["mine.py"]["mine.py --worse"]


# ------------------------------------------------------- statistics -------------------------------
def test_without_a_spread_there_is_no_evidence():
    """One pair; or pairs that are all alike. Only seeds that both have are pairs."""
    for these, those in (
        ({0: 1.0, 3: 9.0}, {0: 0.0, 4: 1.0}),
        ({0: 1.0, 1: 2.0}, {0: 0.0, 1: 1.0}),
    ):
        line = compare.compare_pairs(these, those)
        assert (line.half, line.smallest_effect) == (math.inf, math.inf)
        assert (line.p, line.mean) == (1, 1)
    rounded = compare.compare_pairs({0: 10.35, 1: 10.25}, {0: 10.3, 1: 10.2})  # 0.05 but for bits
    assert len({*rounded.differences}) == 2 and rounded.p == 1


def comparison(p, mean, half=1.0, sign=1):
    """A Comparison with what `correct` and `verdict_of` read."""
    return compare.Comparison([], [], mean, half, sign, 0.0, p)


def test_holm_decides_over_all_lines():
    """5 times the lowest p, 4 times the next; a higher p is never corrected to a lower one."""
    ps = (0.03, 0.001, 0.028, 0.6, 0.7)
    lines = [comparison(p, mean) for p, mean in zip(ps, (2, -2, 3, 0.4, 0.1))]
    compare.correct(lines)
    assert [line.p_holm for line in lines] == pytest.approx([0.112, 0.005, 0.112, 1, 1])
    assert [compare.verdict_of(line) for line in lines] == [
        "not decidable",
        "worse",
        "not decidable",
        "no difference above 1.4",
        "no difference above 1.1",
    ]
    assert compare.verdict_of(lines[3], narrow=0) == "not decidable"
    less_is_better, too_wide = comparison(0.04, -2, 1.9, sign=-1), comparison(0.9, 0.1, 3.0)
    for line in (less_is_better, too_wide):
        compare.correct([line])
    assert compare.verdict_of(less_is_better) == "better"
    assert compare.verdict_of(too_wide) == "not decidable"


@pytest.mark.parametrize("metric, sign, narrow", [
    ("text_to_image/R@1", 1, 1.5), ("knn@1/mean_per_class", 1, 1.5), ("text_to_image/MdR", -1, 0),
    ("normalize/none/error/text_to_image", -1, 0), ("modality_gap", -1, 0),
    ("embeddings/gap", -1, 0), ("embeddings/info_nce", -1, 0), ("embeddings/pos_cos", 1, 0)])
def test_which_metrics_are_better_if_less_and_which_are_points(metric, sign, narrow):
    assert (compare.sign_of(metric), compare.narrow_of(metric)) == (sign, narrow)


def test_comparisons_that_have_not_run_count_as_lines_with_p_1():
    ps, means = (0.04, 0.001, 0.02), (2, -2, 3)
    some = [comparison(p, mean) for p, mean in zip(ps, means)]
    everything = [comparison(p, mean) for p, mean in zip((*ps, 1, 1), (*means, 0.1, 0.1))]
    compare.correct(some, 5)
    compare.correct(everything)
    assert [line.p_holm for line in some] == [line.p_holm for line in everything[:3]]


@pytest.mark.parametrize("pairs", [2, 5, 30])
def test_interval_and_smallest_effect_are_scipy_s(pairs):
    for x in np.random.default_rng(pairs).normal(size=(3, pairs)) + np.array([[0.2], [1.5], [3]]):
        line = compare.compare_pairs(dict(enumerate(x)), dict.fromkeys(range(pairs), 0.0))
        expected, error = stats.ttest_1samp(x, 0), stats.sem(x)
        interval = (line.mean - line.half, line.mean + line.half)
        assert interval == pytest.approx(expected.confidence_interval(0.95))
        assert line.p == pytest.approx(expected.pvalue)
        least = (stats.t.ppf(0.975, pairs - 1) + stats.t.ppf(0.8, pairs - 1)) * error
        assert line.smallest_effect == pytest.approx(least)


# ------------------------------------------------------- compare ----------------------------------
def test_compare_runs_pairs_says_what_it_found_and_goes_on(fork, capsys):
    words = [*PAIR, "--dataset", "own.csv", "--seeds", "2", "--out", "out"]
    compare.main(words)
    assert sorted(calls()) == ["0 0 0 False", "0 0 0 True", "1 0 0 False", "1 0 0 True"]
    line = line_of("out")
    assert line["differences"] == pytest.approx([-20, -19.9]) and line["verdict"] == "worse"
    assert "| -19.95 ± 0.64 | 0.70 | worse |" in capsys.readouterr().out
    assert Path("out/comparison.png").stat().st_size > 5000
    file = next(Path("out/runs").glob("mine-*.json"))
    assert "--dataset own.csv" in read_json(file)["command"]
    file.unlink()  # a half-done comparison
    compare.main(words)
    assert len(calls()) == 5
    text = capsys.readouterr()
    assert "3 of 4 runs are stored in out/runs" in text.out and "1/1" in text.err
    assert "could show: the smallest difference that such pairs detect" in text.out
    Path("mine.py").write_text(FORK + "# edited")  # its old runs do not count
    compare.main(words)
    assert len(calls()) == 9


def test_records_of_two_versions_of_a_recipe_are_not_mixed(fork, monkeypatch):
    words = [*PAIR, "--dataset", "own.csv", "--seeds", "2", "--out", "out"]
    compare.main(words)
    for version in (2, 3):  # old records have none
        monkeypatch.setattr(compare, "RECIPE_VERSIONS", {"set": version})
        with pytest.raises(SystemExit, match=f"version {version - 1} of the recipe, now {version}"):
            compare.main(words)
        shutil.rmtree("out/runs")
        compare.main(words)
        records = [read_json(file) for file in Path("out/runs").iterdir()]
        assert [record["version"] for record in records] == [version] * 4


def test_an_edited_file_of_a_command_is_another_run(tmp_path):
    data = tmp_path / "captions.csv"
    data.write_text("image,caption\n", encoding="utf8")
    runs = compare.Runs(tmp_path, by_source=True)
    words = ["temo.py", "--seed", "0", "--dataset", str(data)]
    with_equals = [*words[:3], f"--dataset={data}"]
    before = [runs.file(words), runs.file(with_equals)]
    assert [runs.file(words), runs.file(with_equals)] == before
    data.write_text("image,caption\na.jpg,a\n", encoding="utf8")
    after = [runs.file(words), runs.file(with_equals)]
    assert not set(before) & set(after)


def test_compare_tunes_on_val_on_a_seed_of_its_own(fork):
    """Val is best where test is worst: the lowest tau is chosen. Pairs are over another flag."""
    compare.main([*PAIR, "--tune", "tau=0.3,0.1,0.2", "--vary", "split-seed", "--seeds", "2"])
    tuning, pairs = calls()[:6], calls()[6:]
    assert sorted(tuning) == sorted(
        f"0 1000 {t} {w}" for t in (0.1, 0.2, 0.3) for w in (False, True)
    )
    assert sorted(pairs) == sorted(f"0 {k} 0.1 {w}" for k in (0, 1) for w in (False, True))
    arm = read_json("runs/compare/comparison.json")["arms"]["mine.py"]
    assert arm["flags"] == "mine.py --tau=0.1" and len(arm["tuning"]) == 3
    compare.main([*PAIR, *"--tune tau=0.3,0.3,0.1 --tune tau=0.2 --seeds 1 --out again".split()])
    arm = read_json("again/comparison.json")["arms"]["mine.py"]
    assert arm["flags"] == "mine.py --tau=0.1" and len(arm["tuning"]) == 3
    with pytest.raises(SystemExit, match="2"):  # which tau would it be?
        compare.main([*PAIR, "--tune", "tau=1", "--tau", "2"])


def test_means_deviations_and_further_metrics(fork, capsys):
    """Also of ranks, of which less is better."""
    compare.main([*PAIR, "--metric", "text_to_image/MdR", "--also", "text_to_image"])
    table = capsys.readouterr().out
    assert "| `mine.py` | 49.00 ± 1.00 |" in table
    assert "| `mine.py --worse` | 68.90 ± 1.10 |" in table
    assert (
        "| text_to_image/R@1 | 51.00 ± 1.00 | 31.10 ± 1.10 |"
        in Path("runs/compare/comparison.md").read_text()
    )
    line = line_of("runs/compare")
    assert line["mean"] == pytest.approx(19.9) and line["verdict"] == "worse"
    compare.main(["mine.py", "mine.py --extra", "--also", "text_to_image/R@1", "extra"])
    table = capsys.readouterr().out
    assert "| text_to_image/R@1 | 51.00 ± 1.00 | 51.00 ± 1.00 |" in table
    assert "| extra | - | 7.00 ± 0.00 |" in table
    with pytest.raises(SystemExit, match="^R@5: not in the test results of .*: text_to_image/R@1"):
        compare.main([*PAIR, "--metric", "R@5"])


def test_a_failed_run_is_said_and_not_tried_again(fork, capsys):
    with pytest.raises(SystemExit, match="^1 runs failed"):
        compare.main([*PAIR, "--dataset", "bad", "--seeds", "3"])
    assert len(calls()) == 6 and "AssertionError: no" in capsys.readouterr().out
    assert line_of("runs/compare")["seeds"] == [0, 2]
    with pytest.raises(SystemExit, match="mine.py --worse: has no pair with mine.py, since runs"):
        compare.main([*PAIR, "--odd", "--seeds", "2"])


# ------------------------------------------------------- claims -----------------------------------
def test_tables_come_from_the_stored_runs(tmp_path, monkeypatch):
    """The committed tables, and with them the names of runs: a changed word would lose them."""
    shutil.copytree(
        claims.RESULTS / "claims", tmp_path / "claims", ignore=shutil.ignore_patterns("*.png")
    )
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    claims.main(["--report"])
    for name in ("claims.md", "claims_3.md", "claims_10.md"):
        assert (tmp_path / name).read_text() == (compare.RESULTS / name).read_text()


def test_a_verdict_does_not_depend_on_the_claims_of_other_papers(monkeypatch):
    """Holm's correction is within a paper."""
    runs = compare.Runs(compare.RESULTS / "claims")
    of_ncl = {name: claim for name, claim in claims.CLAIMS.items() if claim.paper == "NCL"}
    assert 1 < len(of_ncl) < len(claims.CLAIMS)
    together = claims.judge_all(runs, 1)
    monkeypatch.setattr(claims, "CLAIMS", of_ncl)
    alone = claims.judge_all(runs, 1)
    for name, result in alone.items():
        assert result.comparisons and result.comparisons == together[name].comparisons


@pytest.mark.parametrize("pixels, verdict", [(38.0, "held"), (40.1, "no ground")])
def test_a_claim_on_knn_decides_only_above_what_needs_no_training(
    pixels, verdict, tmp_path, monkeypatch
):
    claim = claims.CLAIMS["ts-range"]
    method, baseline = claim.methods
    monkeypatch.setattr(claims, "CLAIMS", {"ts-range": claim})
    runs = compare.Runs(tmp_path)
    for seed in range(4):
        for arm, found in ((method, 50 + 0.1 * seed), (baseline, 40 + 0.2 * seed)):
            (trial,) = claims.arm_of(runs, claim, arm, 1).trials
            of = (
                {"knn@1": {"mean_per_class": found}},
                {"trivial": {"pixels": {"knn@1": {"mean_per_class": pixels}}}},
            )
            record = {
                "command": "",
                "steps": 1,
                "wall_s": 1.0,
                "commit": "",
                "machine": "",
                "test": {"emoji-scenes": of[0]},
                "chance": {"emoji-scenes": of[1]},
            }
            runs.file(runs.words(trial, seed)).write_text(json.dumps(record))
    (line,) = claims.judge_all(runs, 1)["ts-range"].comparisons.values()
    assert line.verdict == verdict  # the baseline is at least 39.9 to 40.7
    assert (line.p_holm is not None) == (verdict == "held")


def test_every_claim_names_flags_that_its_script_has(tmp_path):
    """At each length; all arms with equally many different trials."""
    runs = compare.Runs(tmp_path)
    for name, claim in claims.CLAIMS.items():
        arms = [claims.arm_of(runs, claim, method, 1) for method in claim.methods]
        asked = [words for arm in arms for words in arm.trials]
        assert len({len(arm.trials) for arm in arms}) == 1, name
        assert all(arm.test_metric for arm in arms), name
        read = set()
        for words in asked:
            script = importlib.import_module(words[0].removesuffix(".py"))
            today, longer = (
                vars(script.parse_args(of[1:])) for of in (words, claims.lengthen(words, 10))
            )
            assert (longer["epochs"], longer["warmup_epochs"]) == (
                10 * today["epochs"],
                10 * today["warmup_epochs"],
            )
            read.add(
                str(
                    sorted(
                        (k, str(v))
                        for k, v in today.items()
                        if k not in ("changed", "command_line")
                    )
                )
            )
        assert len(read) == len({*map(tuple, asked)}), name


def commit_all(folder):
    """Makes the folder a git repository with one commit."""
    for words in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"],
    ):
        subprocess.run(["git", *words], cwd=folder, check=True)


def test_results_are_no_changes_of_the_code(tmp_path, monkeypatch):
    """Tables are rewritten while runs are made: their records must still name a clean commit."""
    files = ("benchmarks/results/claims.md", "temo.py", "contrastive/engine/log.py")
    commit_all(write_files(tmp_path, dict.fromkeys(files, "before")))
    monkeypatch.setattr(engine.log, "__file__", str(tmp_path / files[2]))
    for changed, script, dirty in (
        ("benchmarks/results/claims.md", "temo.py", False),
        ("mine.py", "temo.py", False),
        ("mine.py", "mine.py", True),
        ("temo.py", "temo.py", True),
    ):
        (tmp_path / changed).write_text("after")  # git does not know the fork mine.py
        monkeypatch.setattr(sys, "argv", [str(tmp_path / script)])
        assert engine.log.commit().endswith("+changes") == dirty


def test_a_fork_outside_the_checkout_has_no_clean_commit(tmp_path, monkeypatch):
    write_files(tmp_path, {"ours/contrastive/engine/log.py": "", "mine.py": ""})
    commit_all(tmp_path / "ours")
    file = tmp_path / "ours" / "contrastive" / "engine" / "log.py"
    monkeypatch.setattr(engine.log, "__file__", str(file))
    for program, dirty in (("mine.py", True), ("pytest", False)):
        monkeypatch.setattr(sys, "argv", [str(tmp_path / program)])
        assert engine.log.commit().endswith("+changes") == dirty


# ------------------------------------------------------- speed, memory, a GPU --------------------
ROWS = {
    "jpeg": lambda: speed.jpeg(1, 8),
    "cc3m_views": lambda: speed.cc3m_views(1, 8, 4),
    "decode_clips": lambda: speed.decode_clips(1, 1),
    **{name: gpu.ROWS[name].function for name in ("views", "step", "loss", "mama", "memory")},
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_runs_at_toy_size(name):
    """So that it also runs where nobody watches it."""
    numbers = [x for x in flatten(ROWS[name]()).values() if not isinstance(x, str)]
    assert numbers and all(math.isfinite(x) and x > 0 for x in numbers)


def test_the_idle_part_of_a_gpu():
    kind = torch.autograd.DeviceType.CUDA if gpu.HAS_GPU else torch.autograd.DeviceType.CPU
    spans = [(0, 4), (1, 2), (6, 8), (7, 10)]  # one inside another, a gap, an overlap
    events = [
        SimpleNamespace(
            time_range=SimpleNamespace(start=a, end=b), device_type=kind, is_user_annotation=False
        )
        for a, b in spans
    ]
    assert gpu.idle_part(SimpleNamespace(events=lambda: events)) == pytest.approx(0.2)


def test_what_a_step_keeps_and_computes_is_counted_without_a_gpu():
    class Toy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())

        def forward(self, x):
            y = self.layers(x)[:, None]  # (n, 1, L = 10, 8), one head
            return torch.nn.functional.scaled_dot_product_attention(y, y, y)

    kept, flops, largest = recipes.forward_cost(Toy(), lambda: {"x": torch.zeros(3, 10, 4)}, "no")
    # of 10, padded to 32
    x, y, out, log_sum = (4 * n for n in (3 * 10 * 4, 3 * 10 * 8, 3 * 10 * 8, 3 * 32))
    assert largest in (x, y)
    assert x + y + out <= kept <= x + y + out + log_sum + 16  # two random states
    assert flops == 2 * 3 * 10 * 4 * 8 + 2 * 2 * 3 * 10 * 10 * 8
    cost = recipes.forward_cost(Toy().layers, lambda: {"input": torch.zeros(3, 10, 4)}, "bf16")
    assert cost.kept_bytes == 2 * (3 * 10 * 4 + 3 * 10 * 8)


def test_a_recipe_needs_less_in_chunks_and_with_layers_that_run_again():
    line = (
        "temo.py --dataset moving-emoji --frames 2 --image-size 32 --batch-size 64 "
        "--image-encoder test_vit"
    )
    whole, chunks, again = (
        recipes.estimate(f"{line} {more}", 1)
        for more in ("", "--chunk-size 16", "--grad-checkpointing")
    )
    assert math.isclose(whole["GB kept"], 4 * chunks["GB kept"], rel_tol=0.01)
    assert again["GB kept"] < 0.8 * whole["GB kept"]
    assert whole["GB"] > recipes.estimate(line, 8)["GB"]
    assert chunks["GFLOP of a sample"] == again["GFLOP of a sample"] > whole["GFLOP of a sample"]
