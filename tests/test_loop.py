"""The loops of the five scripts: what a run logs and where its weights go, recomputed from flags, steps and terms."""

import functools
import importlib

from contrastive import engine

import pytest
import torch

import mama
import temo
import temperature_schedules as ts
from helpers import run_script, steps

NAMES = ("temperature_schedules", "mmts", "ncl", "mama", "temo")
BATCH, TOTAL, CLIP = 16, 10, 1e-2
SMALL = [*"--cpu --workers 0 --dataset moving-emoji --clips 32 16 16".split(),
         *f"--batch-size {BATCH} --log-every 1 --eval-every 0".split()]  # two steps an epoch
PLAIN = [*"--optimizer sgd --beta1 0 --weight-decay 0 --warmup-epochs 0 --lr 1".split(), "--grad-clip", CLIP]
SLOPE = [*PLAIN, *f"--max-steps {TOTAL} --warmup-epochs 1 --lr-schedule linear --lr-end 0.1".split()]
OF = {"temperature_schedules": ["--period", 3], "mmts": ["--num-clusters", 4],
      "mama": ["--meta-size", 4, "--meta-batch-size", 2]}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """{script's name: (rows of its log, how far all weights went in each step)} of one short run for each script."""
    @functools.cache
    def run(name):
        script, folder, seen = importlib.import_module(name), tmp_path_factory.mktemp(name) / "run", []

        def watch(method):
            def after(run, *args):
                out = method(run, *args)
                seen.append([p.detach().clone() for g in run.optimizer.param_groups for p in g["params"]])
                return out
            return after
        with pytest.MonkeyPatch.context() as patch:
            for method in ("begin", "done"):
                patch.setattr(engine.run.Run, method, watch(getattr(engine.run.Run, method)))
            run_script(script, folder, *SLOPE, *OF.get(name, ()), base=SMALL)
        ways = [sum((a - b).square().sum().item() for a, b in zip(*two)) ** 0.5 for two in zip(seen, seen[1:])]
        return steps(folder), ways
    return run


# ---------------------------------------------------- all five ------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_the_learning_rate_is_that_of_step_warm_up_and_schedule(run_of, name):
    log, _ = run_of(name)
    assert [row["step"] for row in log] == [*range(1, TOTAL + 1)]
    assert [row["lr"] for row in log] == pytest.approx([1.0, *(0.1 + 0.9 * (1 - k / 9) for k in range(9))])


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_sgd_goes_as_far_as_rate_and_clip_say(run_of, name):
    """Gradients are longer than the clip, so that a step has the length rate times clip."""
    log, ways = run_of(name)
    assert ways == pytest.approx([row["lr"] * CLIP for row in log], rel=1e-2)


JITTERED = {"flags": "--crop-min .3 --flip .1 --jitter .2",
            "views": [dict(scale_min=0.3, flip=0.1, jitter_p=1, brightness=0.2, contrast=0.2, saturation=0.2)]}
STRONG = dict(scale_min=0.6, flip=0.7, jitter_p=0.8, brightness=0.15, contrast=0.15, saturation=0.15, hue=0.45,
              grey=0.55, blur=0.65)
VIEWS = {
    "ncl": JITTERED, "mama": JITTERED,
    "mmts": {"flags": f"{JITTERED['flags']} --randaugment-ops 1 --randaugment-magnitude 5",
             "views": [JITTERED["views"][0] | dict(randaugment=(1, 5))]},
    "temperature_schedules": {"flags": "--crop-min .6 --flip .7 --jitter-p .8 --jitter .15 --hue .45 --grey .55 "
                                       "--blur .65", "views": [STRONG] * 2},
    "temo": {"flags": "--crop-min .3 --flip .1 --jitter .2 --randaugment-ops 1 --randaugment-magnitude 5 "
                      "--image-aug simclr --aug-crop-min .6 --aug-flip .7 --aug-jitter .15 --aug-hue .45 "
                      "--aug-blur .65",
             "views": [JITTERED["views"][0] | dict(jitter_p=0.8, randaugment=(1, 5)),
                       STRONG | dict(grey=0.2)]}}


@pytest.mark.parametrize("name", NAMES)
def test_each_strength_of_a_view_is_that_of_its_own_flag(name, tmp_path, monkeypatch):
    class Views(Exception):
        pass

    def stop(run, views, transform):
        raise Views([vars(v) for v in views])
    monkeypatch.setattr(engine.run.Run, "batches", stop)
    with pytest.raises(Views) as found:
        run_script(importlib.import_module(name), tmp_path / "run", *SMALL, *OF.get(name, ()),
                   *VIEWS[name]["flags"].split(), "--image-size", 24, "--max-steps", 1)
    usual = dict(size=24, hue=0, grey=0, blur=0, randaugment=(0, 0), squash=False)
    assert found.value.args[0] == [usual | view for view in VIEWS[name]["views"]]


# ---------------------------------------------------- TeMo and its baselines ----------------------------------------
def test_temo_s_loss_is_made_of_the_terms_in_its_log(run_of):
    """Eq. 8 at t = steps before this one / all steps."""
    for row in run_of("temo")[0]:
        t = (row["step"] - 1) / TOTAL
        expected = (1 - t) ** 2 * row["L_MM"] + t ** 2 * (row["L_M-MM"] + row["L_M-I2I"] + row["L_M-T2T"])
        assert row["loss"] == pytest.approx(expected, rel=1e-4), row["step"]


def test_the_temperature_of_ts_is_that_of_the_step(tmp_path):
    run_script(temo, tmp_path / "run", "--loss", "ts", "--max-steps", 6, base=SMALL)
    expected = [temo.ts_temperature(k / 6, 0.05, 0.15) for k in range(6)]
    assert [row["tau"] for row in steps(tmp_path / "run")] == pytest.approx(expected)
    assert len({round(tau, 4) for tau in expected}) > 1


def test_slip_adds_its_weighted_image_loss(tmp_path, monkeypatch):
    seen, simclr_loss = [], temo.simclr_loss

    def watch(*args):
        seen.append(args[:2])
        return simclr_loss(*args)
    monkeypatch.setattr(temo, "simclr_loss", watch)
    run_script(temo, tmp_path / "run", "--loss", "slip", "--no-learnable-tau", "--max-steps", 2, base=SMALL)
    for row, (z1, z2) in zip(steps(tmp_path / "run"), seen, strict=True):
        assert not torch.allclose(z1, z2)
        assert row["loss"] == pytest.approx(row["L_MM"] + ts.nt_xent(z1, z2, 0.1).item(), rel=1e-4)


@pytest.mark.parametrize("loss", ["temo --no-base", "dystress"])
def test_detach_tau_decides_over_the_gradient(loss, tmp_path):
    """The first loss is the same with and without; the second, after a step, is another."""
    found = []
    for flag in ("--detach-tau", "--no-detach-tau"):
        run_script(temo, tmp_path / flag[2:], "--loss", *loss.split(), *PLAIN, "--max-steps", 2, flag, base=SMALL)
        found.append([row["loss"] for row in steps(tmp_path / flag[2:])])
    kept, free = found
    assert kept[0] == free[0] and kept[1] != pytest.approx(free[1], rel=1e-6)


def test_the_order_of_views_and_texts():
    """I and T are the first of each; SLIP's features are those of its two strong views."""
    views, tokens = ({i: torch.full((2, 1), base + i) for i in range(3)} for base in (0, 10))
    def model(pixels, joined):
        return pixels, joined["input_ids"], pixels + 100
    tokens = {i: {"input_ids": x, "attention_mask": x} for i, x in tokens.items()}
    def numbers(n, m, **more):
        out = temo.encode(model, {"pixels": dict([*views.items()][:n]), "tokens": dict([*tokens.items()][:m])}, **more)
        return [x.unique().item() for x in out]
    assert numbers(1, 1) == [0, 10] and numbers(2, 2) == [0, 10, 1, 11]
    assert numbers(3, 1, slip=True) == [0, 10, 101, 102]
    alone = temo.encode(model, {"pixels": {1: views[1]}, "tokens": {1: tokens[1]}})  # I~ and T~
    assert [x.unique().item() for x in alone] == [1, 11]
    with pytest.raises(ValueError, match="zip"):
        numbers(2, 1)


# ---------------------------------------------------- temperature schedules -----------------------------------------
def test_the_temperature_of_ts_is_that_of_the_epoch(run_of):
    log = run_of("temperature_schedules")[0]
    assert [row["tau"] for row in log] == [ts.temperature(k // 2, period=3) for k in range(TOTAL)]
    assert len({row["tau"] for row in log}) > 1


def test_sdclr_prunes_anew_in_each_epoch(tmp_path, monkeypatch):
    events = []

    def watch(name):
        function = getattr(ts, name)

        def called(*args):
            events.append(name)
            return function(*args)
        monkeypatch.setattr(ts, name, called)
    watch("prune_masks")
    watch("nt_xent")
    run_script(ts, tmp_path / "run", "--loss", "sdclr", "--max-steps", 4, base=SMALL)
    assert events == ["prune_masks", "nt_xent", "nt_xent"] * 2


def test_moco_s_keys_follow_the_queries(tmp_path, monkeypatch):
    moved, update = [], ts.update_momentum

    def watch(key, tower, momentum):
        before, online = ([p.detach().clone() for p in m.parameters()] for m in (key, tower))
        update(key, tower, momentum)
        for k, a, b in zip(key.parameters(), before, online, strict=True):
            moved.append((a - b).abs().max().item())
            assert torch.allclose(k, 0.99 * a + 0.01 * b, atol=1e-6)
    monkeypatch.setattr(ts, "update_momentum", watch)
    run_script(ts, tmp_path / "run", "--loss", "moco", "--queue-size", 32, "--max-steps", 2, *PLAIN,
               "--grad-clip", 1, base=SMALL)
    assert max(moved) > 1e-3


# ---------------------------------------------------- the others ----------------------------------------------------
def test_mama_s_margin_is_that_of_the_step(run_of):
    expected = [mama.margin(k, 0.1) for k in range(TOTAL)]
    assert [row["mu"] for row in run_of("mama")[0]] == pytest.approx(expected)
