"""docs/forking.md as it stands: a new weighting and schedule run, resume, and are what banner and pictures say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from contrastive import figures
from contrastive.engine.checkpoints import checkpoints_of
from contrastive.engine.run import Run

import pytest
from PIL import Image

import eval as eval_py
import launch
import mama
import mmts
import ncl
import temo
import temperature_schedules as ts
from helpers import fork, losses, panel, run_script, steps, write_images

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "forking.md").read_text(encoding="utf8"), re.S)
END = "\n# ======================================================= flags ==="  # of METHOD
TINY = ("--cpu --workers 0 --image-size 16 --embed-dim 8 --frames 2 --batch-size 8 --clips 16 8 8 --log-every 1 "
        "--eval-every 0 --max-steps 4").split()


@pytest.fixture(scope="module")
def weighting(tmp_path_factory):
    """mine.py with the page's weighting."""
    folder = tmp_path_factory.mktemp("weighting")
    pasted = fork(mama, folder, END, f"\n{BLOCKS[0]}\n{END}")
    return fork(pasted, folder, "    own.to(run.device)\n", f"{BLOCKS[1]}    own.to(run.device)\n")


def lose_step_4(folder):
    """As if the run had been killed after step 2 of 4."""
    checkpoints_of(folder)[0].unlink()
    (folder / "summary.json").unlink()
    assert checkpoints_of(folder)[0].stem == "step_2"


def test_the_page_is_short():
    assert len(BLOCKS) == 9 and sum(block.count("\n") for block in BLOCKS[:8]) <= 44       # the last is no fork


def test_a_weighting_is_what_is_said_drawn_and_resumed(weighting, tmp_path, capsys, pictures):
    flags = [*TINY, "--save-every", 2, "--weighting", "median", "--a0", 2]
    run_script(weighting, tmp_path / "whole", *flags, pictures=True)
    said = capsys.readouterr().out
    assert "weights median" in said and "meta-data" not in said and "METHOD" not in said
    assert (tmp_path / "whole" / "weights.png").is_file()
    assert {row["w"] for row in steps(tmp_path / "whole")} != {1.0}
    run_script(weighting, tmp_path / "cut", *flags)
    lose_step_4(tmp_path / "cut")
    weighting.main(weighting.parse_args(["--resume", str(tmp_path / "cut")]))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert "METHOD" not in capsys.readouterr().out


LEARNT = {  # a learnt temperature of the loss, a parameter in own
    ts: [("    own.to(run.device)\n", """    own["tau"] = nn.ParameterDict({"log_tau": torch.tensor(-1.0)})
    own.to(run.device)\n"""), ("        if args.tau_head: ", """        tau = own["tau"]["log_tau"].exp()
        if args.tau_head: """)],
    mama: [("    own.to(run.device)\n", """    own.log_tau = nn.Parameter(torch.tensor(-1.0))
    own.to(run.device)\n"""), ("args.contrastive_weight * contrast(video, text, tau, mu)",
                                "contrast(video, text, own.log_tau.exp(), mu)"),
           ("run.done(batch, loss, tau, ", "run.done(batch, loss, own.log_tau.exp(), ")]}


@pytest.mark.parametrize("script", LEARNT)
def test_what_a_fork_learns_in_own_is_averaged_trained_and_resumed(script, tmp_path):
    own = script
    for old, new in LEARNT[script]:
        own = fork(own, tmp_path, old, new)
    flags = [*TINY, "--optimizer", "sgd", "--lr", 0.1, "--warmup-epochs", 0, "--grad-clip", 0, "--save-every", 2]
    flags += ["--dataset", "moving-emoji", *(["--meta-batch-size", 2, "--meta-size", 4] if script is mama else [])]
    run_script(own, tmp_path / "one", *flags)
    launch.finish(own.__file__, [*flags, "--output-dir", tmp_path, "--run-name", "two"], tmp_path / "log", processes=2)
    one, two = ([row["tau"] for row in steps(tmp_path / name)] for name in ("one", "two"))
    assert abs(one[1] - one[0]) > 1e-4  # by --lr, from the first step on
    assert len(set(one)) == 4 and two == pytest.approx(one, rel=1e-5)
    lose_step_4(tmp_path / "one")
    own.main(own.parse_args(["--resume", str(tmp_path / "one")]))
    assert [row["tau"] for row in steps(tmp_path / "one")] == one


def test_a_part_of_own_with_a_rate_of_its_own(tmp_path):
    own = fork(mmts, tmp_path, "    own.to(run.device)\n", """    own["net"] = nn.Linear(8, 1)
    own.to(run.device)\n""")
    own = fork(own, tmp_path, "    learnt = [tower, own]\n", BLOCKS[4])
    own = fork(own, tmp_path, "    # <<< shared\n    model, optimizer", f"""    # <<< shared
{BLOCKS[5]}    model, optimizer""")
    own = fork(own, tmp_path, "        run.check_finite", """        loss = loss + own["net"](image).mean()
        run.rates = [group["lr"] / run.lr for group in optimizer.param_groups]
        run.moved = [p.detach().clone() for p in own["net"].parameters()]
        run.check_finite""")
    seen, done, wrap = [], Run.done, Run.wrap

    def decays(run, trained, own, optimizer, second=None):
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0, 0.3, 0]
        return wrap(run, trained, own, optimizer, second)
    own.Run = type("Watched", (Run,), {"wrap": decays, "done": lambda run, *args: (
        seen.append((run.rates, [(p - q).abs().max().item() for p, q in zip(run.own["net"].parameters(), run.moved)])),
        done(run, *args))})
    flags = [*TINY, "--dataset", "moving-emoji", "--num-clusters", 4, "--warmup-epochs", 0, "--save-every", 2,
             "--weight-decay", 0.3]
    run_script(own, tmp_path / "a", *flags)
    assert all(rates == [1, 1, 10, 10] and min(moved) > 0 for rates, moved in seen) and len(seen) == 4
    lose_step_4(tmp_path / "a")
    own.main(own.parse_args(["--resume", str(tmp_path / "a")]))
    assert seen[4:] == seen[2:4]


def test_a_backbone_and_a_data_set_of_one_s_own_are_trained_and_evaluated(tmp_path, monkeypatch):
    """As a user does it: mine.py, then eval.py in a process of its own, from the folder of the pictures."""
    for split, n in (("train", 24), ("test", 8)):
        write_images(tmp_path / "pictures" / split, range(n))
    text = Path(temo.__file__).read_text(encoding="utf8")
    for old, new in (("import argparse\n", "import argparse\nfrom pathlib import Path\n\nimport timm\n"),
                     (END, f"\n{BLOCKS[3]}\n\n{BLOCKS[6]}\n{END}")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "mine.py").write_text(text, encoding="utf8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    flags = [*TINY[:TINY.index("--frames")], "--batch-size", 8, "--max-steps", 2, "--eval-every", 0, "--log-every", 1]
    flags += ["--dataset", "mine", "--image-encoder", "mynet", "--loss", "infonce", "--learnable-tau"]
    launch.finish(tmp_path / "mine.py", [*flags, "--output-dir", tmp_path, "--run-name", "a"], tmp_path / "log")
    command = [sys.executable, ROOT / "eval.py", "--import", "mine", "--checkpoint", "a", "--cpu", "--workers", "0"]
    done = subprocess.run([*command, "--tasks", "retrieval"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    evaluated = json.loads((tmp_path / "a" / "eval" / "eval.json").read_text())["datasets"]["mine"]["metrics"]
    trained = json.loads((tmp_path / "a" / "summary.json").read_text())["test"]["mine"]
    assert evaluated["images"] == 8 and {k: trained[k] for k in evaluated} == evaluated
    names = {}
    exec(BLOCKS[7].replace("runs/NAME", "a"), names)
    assert names["own"].keys() == {"tau.log_tau"}


def test_an_encoder_that_is_not_used_is_frozen(tmp_path):
    place = "    own.to(run.device)\n"
    frozen = fork(ncl, tmp_path, place, f"    tower.text.requires_grad_(False)\n{place}")
    for chunk in (0, 4):
        run_script(frozen, tmp_path / f"{chunk}", *TINY, "--dataset", "moving-emoji", "--chunk-size", chunk)
    assert losses(tmp_path / "4") == pytest.approx(losses(tmp_path / "0"), rel=1e-4)


@pytest.mark.parametrize("script", [ts, mmts, ncl, mama, temo])
def test_a_fork_whose_loss_has_no_random_guess_says_none(script, tmp_path, capsys):
    """What a script says of its loss comes from random_guess and banner_lines: without them nothing is said."""
    own = fork(script, tmp_path, "\nif __name__ ==", "\nrandom_guess = lambda *_: None\nif __name__ ==")
    flags = [*TINY, "--dataset", "moving-emoji", "--max-steps", 1]
    more = {mmts: ["--num-clusters", 4], mama: ["--meta-batch-size", 2, "--meta-size", 4]}
    run_script(own, tmp_path / "a", *flags, *more.get(script, []))
    said = capsys.readouterr().out
    assert "batch  " in said and "negatives" not in said and "random guess" not in said


def test_an_error_of_one_s_own_evaluation_ends_the_run_at_once(tmp_path):
    own = fork(ncl, tmp_path, "    queues = ()\n", "    queues = torch.zeros(2) @ torch.zeros(3)\n")
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        run_script(own, tmp_path / "a", *TINY, "--dataset", "moving-emoji", "--eval-every", 2)


def test_normalize_of_a_fork_s_run_says_whose_functions_it_calls(tmp_path, capsys):
    mine = fork(ncl, tmp_path, '"""NCL: Normalized', '"""Mine: Normalized')
    for own, said in ((ncl, False), (mine, True)):
        run_script(own, tmp_path / own.__name__, *TINY, "--dataset", "moving-emoji")
        eval_py.main(eval_py.parse_args(["--checkpoint", str(tmp_path / own.__name__), "--normalize", "oracle", "--cpu",
                                         "--tasks", "retrieval", "--workers", "0"]))
        words = "WARNING: --normalize: by ncl.py's functions; those of fork_of_ncl.py may differ"
        assert (words in capsys.readouterr().out) == said


def test_weights_that_are_not_the_network_s_are_refused(tmp_path):
    own = fork(mama, tmp_path, "weight = WEIGHTINGS[args.weighting](sample.detach(), own, progress, args)",
               "weight = torch.ones_like(sample).detach()")
    with pytest.raises(ValueError, match="--weighting meta: its network has no part .* take --weighting none"):
        run_script(own, tmp_path / "a", *TINY, "--meta-batch-size", 2, "--meta-size", 4)
    run_script(own, tmp_path / "b", *TINY, "--weighting", "none")


def test_a_schedule_is_what_is_said_drawn_and_refused(tmp_path, monkeypatch, capsys, pictures):
    own = fork(mmts, tmp_path, END, f"\n{BLOCKS[2]}\n{END}")
    drawn = []
    monkeypatch.setattr(figures.mmts, "save_figure", lambda *args: drawn.append(args))
    run_script(own, tmp_path / "a", *TINY, "--num-clusters", 4, "--periods", 1, "--alpha", 0.1, pictures=True)
    assert "tau 0.03 .. 0.17 over the run" in capsys.readouterr().out
    swings = [0.05 - 0.025 * t for t in range(5)]
    largest, *_ = panel(drawn, "(Fig. 3)").lines
    values = dict(zip(largest.get_xdata(), largest.get_ydata()))
    assert [values[t] - 0.12 for t in range(5)] == pytest.approx(swings, abs=1e-6)
    assert all(row["tau_max"] - swing <= 0.12 + 1e-6 for row, swing in zip(steps(tmp_path / "a"), swings))
    with pytest.raises(SystemExit):
        own.parse_args([*TINY, "--periods", "2", "--alpha", "0.08"])
    assert "the temperatures of the run, -0.04 .. 0.16, must be above 0" in capsys.readouterr().err


@pytest.mark.parametrize("loss, word", [("max-margin", "margin"), ("infonce", "tau")])
def test_the_bar_and_the_log_say_what_the_schedule_sets(loss, word, tmp_path, capsys):
    run_script(mmts, tmp_path / loss, *TINY, "--num-clusters", 4, "--loss", loss)
    other = {"margin": "tau", "tau": "margin"}[word]
    assert f" {word}=" in capsys.readouterr().err
    assert all(row[word] == row[f"{word}_mean"] and other not in row for row in steps(tmp_path / loss))


def test_mama_s_bar_and_random_guess_are_without_weights(tmp_path, capsys):
    run_script(mama, tmp_path / "a", *TINY, "--meta-batch-size", 2, "--meta-size", 4)
    said, log = capsys.readouterr(), steps(tmp_path / "a")
    shown = re.findall(r" L=([\d.]+)", said.err)
    assert shown and shown[-1] == f"{log[-1]['L']:.3f}" != f"{log[-1]['loss']:.3f}" and " loss=" not in said.err
    assert "random guess L " in said.out


@pytest.mark.parametrize("name, lines", [("a", 2), ("L_", 5), ("a name for a line", 4)])
def test_a_legend_covers_nothing_that_is_drawn(tmp_path, name, lines):
    fig, axes = figures.base.figure(2)
    for ax in axes:
        for k in range(lines):
            ax.plot([0, 1, 2], [k, k + 5, 9], label=f"{name}{k}")
        figures.base.legend_above(ax)
    figures.base.save_figure(fig, tmp_path / "a.png")
    for ax in axes:
        legend, top = ax.get_legend().get_window_extent(), ax.transData.transform((0, 9))[1]
        assert max(ax.get_yticks()) <= 1.05 * (lines + 8)                  # no numbers beside the legend, such as 150 %
        assert top < legend.y0 + 3 and legend.width < ax.bbox.width + 3       # in pixels


def test_letters_have_one_size_and_a_picture_200_dots_an_inch(tmp_path):
    fig, axes = figures.base.figure(2)
    for ax in axes:
        ax.plot([1, 2], label="line")
        ax.set(title="title", xlabel="x", ylabel="y")
        ax.legend(title="legend")
    figures.base.save_figure(fig, tmp_path / "a.png")
    texts = [t for ax in axes for t in (ax.title, ax.xaxis.label, *ax.get_xticklabels(), *ax.get_legend().get_texts(),
                                        ax.get_legend().get_title())]
    assert {t.get_fontsize() for t in texts} == {figures.base.LETTERS}
    assert Image.open(tmp_path / "a.png").size == tuple(int(200 * x) for x in fig.get_size_inches())
    assert fig.get_size_inches()[0] <= 7.2                                 # 11 points become 5 at 3.3 inches
