"""Verdicts with frozen encoders: both intervals, both of two tied temperatures, unfinished runs."""

import importlib
import shutil
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from benchmarks import frozen
from benchmarks.compare import Runs
from contrastive.core.files import write_json

QUERIES = 400


def write_run(runs, trial, seed, hits, val):
    """A record as Runs.run writes it: `hits` (QUERIES,) of both directions, val R@1."""
    digits = "".join(str(int(hit)) for hit in hits)
    test = 100 * float(np.mean(hits))
    metrics = {"R@1-Mean": test, "normalize": {"none": {"R@1-Mean": test}}}
    on_val = {"R@1-Mean": val, "normalize": {"none": {"R@1-Mean": val}}}
    runs.folder.mkdir(exist_ok=True)
    words = runs.words(frozen.command_words(trial), seed)
    write_json(runs.file(words), {
        "command": " ".join(words), "test": {"openclipart": metrics},
        "val": {"openclipart": on_val}, "chance": {"openclipart": {}},
        "hits": {"text_to_image": digits, "image_to_text": digits}})


def write_method(runs, method, gain, best=(0.07,), spread=0.005):
    """All runs of a method: its share of hits is 0.3 + gain; val prefers the temperatures `best`,
    among which seeds disagree."""
    for k, trial in enumerate(frozen.trials_of(method)):
        tau = frozen.TAUS[k]
        for seed in frozen.TUNING_SEEDS:
            val = 20.0 + 10.0 * (tau in best) + (seed % 3) * (k % 2) - (seed % 3) * 0.5
            write_run(runs, trial, seed, np.zeros(QUERIES), val)
        for seed in range(5):
            rng = np.random.default_rng([k, seed])
            chance = 0.3 + gain + rng.normal() * spread
            u = np.random.default_rng(7).random(QUERIES)  # the same difficulty in all runs
            write_run(runs, trial, seed, u < chance, 0.0)


@pytest.fixture
def claim(tmp_path, monkeypatch):
    """Runs, and one claim of a method against a baseline."""
    method = frozen.Method("method", "ncl.py", frozen.TAU, frozen.R1)
    baseline = frozen.Method("baseline", "temo.py", frozen.TAU, frozen.R1)
    methods = [method, baseline]
    claims = {"claim": frozen.Claim("paper", "it is better", "Table 1", methods, main=True)}
    monkeypatch.setattr(frozen, "CLAIMS", claims)
    return Runs(tmp_path / "runs"), method, baseline


@pytest.mark.parametrize(
    "gain, verdict", [(0.1, "held"), (-0.1, "not held: the baseline is better")])
def test_a_difference_outside_both_intervals_is_a_verdict(claim, gain, verdict):
    runs, method, baseline = claim
    write_method(runs, method, gain)
    write_method(runs, baseline, 0.0)
    result, = frozen.results_of(runs)
    line, = result.lines
    assert result.verdict == verdict
    assert line.paired.mean == pytest.approx(100 * gain, abs=2)
    assert line.pictures[0] < line.paired.mean < line.pictures[1]


def test_seeds_alone_do_not_decide(claim):
    """All seeds gain the same 3 of 400 pictures: the seeds agree, the pictures do not."""
    runs, method, baseline = claim
    for of, num_hits in ((method, 103), (baseline, 100)):
        write_method(runs, of, 0.0)
        for seed in range(5):
            hits = np.zeros(QUERIES)
            hits[:num_hits + seed % 2 * (of is method)] = 1
            write_run(runs, frozen.trials_of(of)[2], seed, hits, 0.0)
    result, = frozen.results_of(runs)
    line, = result.lines
    assert line.paired.p < 0.01 < line.p
    swapped = np.zeros(QUERIES)
    swapped[50:153] = 1  # other pictures than the baseline's
    for seed in range(5):
        write_run(runs, frozen.trials_of(method)[2], seed, np.roll(swapped, seed % 2), 0.0)
    result, = frozen.results_of(runs)
    assert result.verdict == "not decidable"


def test_a_claim_has_to_hold_at_both_of_two_tied_temperatures(claim):
    runs, method, baseline = claim
    write_method(runs, method, 0.1, best=(0.07, 0.1))
    write_method(runs, baseline, 0.0)
    tied = frozen.best_trials(runs, method)
    assert sorted(tied) == sorted(["ncl.py --tau 0.07", "ncl.py --tau 0.1"])
    result, = frozen.results_of(runs)
    assert len(result.lines) == 2 and result.verdict == "held"
    assert result.p == max(line.p for line in result.lines)
    for seed in range(5):  # at 0.1 the method gains nothing
        hits = np.random.default_rng(7).random(QUERIES) < 0.3
        write_run(runs, "ncl.py --tau 0.1", seed, hits, 0.0)
    result, = frozen.results_of(runs)
    assert result.verdict == "not decidable"


def test_equal_methods_are_level(claim, monkeypatch):
    runs, method, baseline = claim
    for of in (method, baseline):
        write_method(runs, of, 0.0)
        for seed in range(5):
            hits = np.random.default_rng(7).random(QUERIES) < 0.3
            hits[seed] ^= of is method  # one picture of 400 changes
            write_run(runs, frozen.trials_of(of)[2], seed, hits, 0.0)
    monkeypatch.setattr(frozen, "LEVEL", 1.0)
    result, = frozen.results_of(runs)
    assert result.verdict == "level"


def test_the_tuning_of_a_claim_has_a_panel_of_its_own(claim, tmp_path, monkeypatch):
    """With a curve for each of its methods; another claim on the same runs has none."""
    runs, method, baseline = claim
    for k, of in enumerate((method, baseline)):
        write_method(runs, of, 0.0, best=(frozen.TAUS[k],))
    first = frozen.CLAIMS["claim"]
    monkeypatch.setitem(frozen.CLAIMS, "gap", replace(first, says="smaller gap", scale=-1))
    own = [replace(baseline, name="as another script"), method]
    monkeypatch.setitem(frozen.CLAIMS, "own", replace(first, says="it is worse", methods=own))
    drawn = []
    monkeypatch.setattr(frozen, "save_figure", lambda figure, path: drawn.append(figure))
    frozen.draw_tuning(runs, tmp_path / "frozen.png")
    panel, = drawn[0].axes
    assert panel.get_title() == "paper: it is better"
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["method", "baseline"]
    write_method(runs, baseline, 0.0, best=(0.2,))
    third = replace(method, name="third", command="mama.py")
    write_method(runs, third, 0.0, best=(0.05, 0.2))
    methods = [third, baseline]
    monkeypatch.setitem(frozen.CLAIMS, "third", replace(first, says="new", methods=methods))
    frozen.draw_tuning(runs, tmp_path / "frozen.png")
    assert [ax.get_title() for ax in drawn[1].axes] == ["paper: it is better", "paper: new"]


def test_nothing_is_decided_before_both_sides_are_tuned_and_run(claim):
    runs, method, baseline = claim
    write_method(runs, method, 0.1)
    result, = frozen.results_of(runs)
    assert result.verdict == "not run"
    missing = frozen.missing_runs(runs, ["claim"], range(5))
    assert len(missing) == len(frozen.TAUS) * len(frozen.TUNING_SEEDS)  # first the tuning
    assert all(words[0] == "temo.py" for words in missing)


def test_the_bootstrap_agrees_with_student_s_t():
    differences = np.random.default_rng(0).normal(0.2, 1, 1000)
    (low, high), p = frozen.bootstrap(differences)
    t_test = stats.ttest_1samp(differences, 0)
    expected = t_test.confidence_interval(0.95)
    assert low == pytest.approx(expected.low, abs=0.01)
    assert high == pytest.approx(expected.high, abs=0.01)
    differences = differences - differences.mean() + 2.2 * stats.sem(differences)
    _, p = frozen.bootstrap(differences)
    assert p == pytest.approx(stats.ttest_1samp(differences, 0).pvalue, abs=0.01)


@pytest.mark.parametrize("main, share", [(True, 3), (False, 1)])
def test_comparisons_that_have_not_run_count_in_the_correction(claim, monkeypatch, main, share):
    """Main claims and others are corrected apart."""
    runs, method, baseline = claim
    write_method(runs, method, 0.1)
    write_method(runs, baseline, 0.0)
    others = [replace(baseline, name=name, command=f"mmts.py --{name}") for name in ("a", "b")]
    further = frozen.Claim("paper", "further", "", [method, *others], main=main)
    monkeypatch.setitem(frozen.CLAIMS, "further", further)
    result, *not_run = frozen.results_of(runs)
    assert result.p_holm == pytest.approx(share * result.p)
    assert [other.verdict for other in not_run] == ["not run", "not run"]


def test_a_claim_that_disagrees_between_two_temperatures_has_p_1(claim):
    runs, method, baseline = claim
    write_method(runs, method, 0.1, best=(0.07, 0.1))
    write_method(runs, baseline, 0.0)
    for seed in range(5):
        hits = np.random.default_rng(7).random(QUERIES) < 0.1
        write_run(runs, "ncl.py --tau 0.1", seed, np.roll(hits, seed), 0.0)
    result, = frozen.results_of(runs)
    assert (result.p, result.verdict) == (1.0, "not decidable")


def test_without_an_interval_over_pictures_nothing_is_level(claim, monkeypatch):
    runs, method, baseline = claim
    write_method(runs, method, 0.0)
    write_method(runs, baseline, 0.0)
    for seed in range(5):  # those of another picture are found
        hits = np.random.default_rng(7).random(QUERIES) < 0.3
        write_run(runs, frozen.trials_of(method)[2], seed, np.roll(hits, seed), 0.0)
    monkeypatch.setattr(frozen, "LEVEL", 50.0)
    line, = frozen.results_of(runs)[0].lines
    assert frozen.is_level(line)
    line.pictures = None
    assert not frozen.is_level(line)


def write_knn(runs, method, first, step, frozen_knn):
    """Adds kNN to the runs of a method's best trial."""
    trial, = frozen.best_trials(runs, method)
    for seed, record in frozen.records_of(runs, trial).items():
        knn = first + step * seed
        record["test"]["openclipart"]["knn@1"] = {"mean_per_class": knn}
        trivial = {"frozen": {"knn@1": {"mean_per_class": frozen_knn}}}
        record["chance"]["openclipart"] = {"trivial": trivial}
        write_json(runs.file(runs.words(frozen.command_words(trial), seed)), record)


@pytest.mark.parametrize("frozen_knn, verdict", [(29.0, "held"), (31.0, "no ground")])
def test_knn_decides_only_above_the_frozen_features(claim, monkeypatch, frozen_knn, verdict):
    runs, method, baseline = claim
    monkeypatch.setattr(frozen.CLAIMS["claim"], "test_metric", frozen.KNN)
    write_method(runs, method, 0.0)
    write_method(runs, baseline, 0.0)
    write_knn(runs, method, 40, 0.1, frozen_knn)
    write_knn(runs, baseline, 30, 0.2, frozen_knn)
    result, = frozen.results_of(runs)
    assert result.verdict.startswith(verdict)
    assert result.lines[0].pictures is None  # hits are those of retrieval


def test_further_conditions_run_at_the_chosen_temperature_and_have_no_verdict(claim):
    runs, method, baseline = claim
    assert frozen.missing_runs(runs, ["claim"], range(2), further=True) == []  # not tuned
    write_method(runs, method, 0.1)
    write_method(runs, baseline, 0.0)
    missing = frozen.missing_runs(runs, ["claim"], range(2), further=True)
    assert len(missing) == 2 * 2 * len(frozen.FURTHER_CONDITIONS)
    assert {words[-1] for words in missing} == {"0.07"}
    assert frozen.further_table(runs) == []
    for words in missing:
        test = 30.0 + int(words[2]) + 2 * (words[0] == "ncl.py") * (1 + int(words[2]))
        write_json(runs.file(words), {"test": {"any": {"R@1-Mean": test}}, "chance": {}})
    rows = [line for line in frozen.further_table(runs) if "it is better" in line]
    assert len(rows) == len(frozen.FURTHER_CONDITIONS)
    cells = "| method `ncl.py --tau 0.07` 33.5 | baseline `temo.py --tau 0.07` 30.5 | 2 | +3.00"
    assert all(cells in row for row in rows)
    assert frozen.missing_runs(runs, ["claim"], range(2), further=True) == []


def test_every_claim_names_flags_that_its_script_has(frozen_packages):
    for name, claim in frozen.CLAIMS.items():
        for method in claim.methods:
            for trial in frozen.trials_of(method):
                script, *flags = frozen.command_words(trial)
                args = importlib.import_module(script.removesuffix(".py")).parse_args(flags)
                assert args.freeze == "both", name


def test_the_tables_come_from_the_stored_runs(tmp_path, monkeypatch):
    folder = frozen.RESULTS / "frozen"
    shutil.copytree(folder, tmp_path / "frozen")
    monkeypatch.setattr(frozen, "RESULTS", tmp_path)
    monkeypatch.setattr(frozen, "draw_tuning", lambda *_: None)  # it takes half of the time
    frozen.main(["--report"])
    for name in ("frozen.md", "frozen_further.md"):
        table = (folder.parent / name).read_text(encoding="utf8")
        assert (tmp_path / name).read_text(encoding="utf8") == table
