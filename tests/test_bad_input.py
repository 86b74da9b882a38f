"""What a user can get wrong: one clear line each, and which of it may cost samples but not the run."""

import json
import re
import runpy
import shutil
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import common
from contrastive import data as data_sets
from contrastive import engine, evaluation
from contrastive.data.batches import epoch_batches
from contrastive.engine.processes import UserError

import pytest
import torch
from safetensors.torch import save_file

import helpers
import launch
import mama
import mmts
import ncl
import temo
import temperature_schedules

TINY = "--cpu --workers 0 --image-size 16 --embed-dim 16 --batch-size 8 --max-steps 2".split()


def run(dataset, out, *flags):
    return temo.main(temo.parse_args([*TINY, "--dataset", str(dataset), "--output-dir", str(out), *map(str, flags)]))


def stopped(dataset, out, *flags):
    """The one line of the UserError that ends this run."""
    with pytest.raises(UserError) as error:
        run(dataset, out, *flags)
    message = str(error.value)
    assert "\n" not in message and len(message) < 700
    return message


def refused(capsys, *flags):
    """The last line of a usage error: exit code 2 before anything is read."""
    with pytest.raises(SystemExit) as stop:
        temo.parse_args([*map(str, flags)])
    lines = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and lines[-1].startswith("error: ") and sum("error: " in x for x in lines) == 1
    return lines[-1][len("error: "):]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return helpers.write_captions(tmp_path_factory.mktemp("good"), 24)


def spoil(folder, n=60):
    """n pictures; of the first training batch one is missing, one cut off, one a text. Returns the csv and the keys."""
    csv = helpers.write_captions(folder, n)
    train = common.load_data(str(csv), "train")
    order = next(epoch_batches(len(train), 8, 42, 0, 1))[1]
    missing, cut, text = (train.key(int(i)) for i in order[[1, 4, 6]])  # the second of two processes reads the last two
    (folder / missing).unlink()
    (folder / cut).write_bytes(helpers.TRUNCATED)
    (folder / text).write_bytes(helpers.TEXT)
    return csv, (missing, cut, text)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run on a set with three bad pictures: its folder, its summary, its data and the bad keys."""
    folder = tmp_path_factory.mktemp("finished")
    csv, bad = spoil(folder / "data")
    summary = run(csv, folder / "runs", "--run-name", "a", "--max-bad-fraction", 0.1)
    return folder / "runs" / "a", summary, csv, bad


# ---------------------------------------------------- the data set --------------------------------------------------
def test_missing_path(tmp_path):
    for name in ("/no/such", "no/such/folder", "none.csv"):
        assert f"--dataset {name}: no such file or folder" in stopped(name, tmp_path)
    for name in ("./none.csv", "nowhere/captions.csv"):  # these might be hub ids
        assert stopped(name, tmp_path).startswith(f"--dataset {name}: ")


def test_unknown_name(tmp_path):
    message = stopped("emojis", tmp_path)
    assert "--dataset emojis: no such file or folder" in message and "org/name" in message
    known = message.split("known set: ")[1].split(", ")
    assert {"emoji", "moving-emoji", "cc3m", "cifar10-lt", "msrvtt"} <= set(known)


def test_unknown_hub_id_offline(tmp_path):
    assert stopped("nobody-at-all/nothing", tmp_path).startswith("--dataset nobody-at-all/nothing: ")


def test_empty_folder(tmp_path):
    (tmp_path / "empty" / "inside").mkdir(parents=True)
    assert re.match(f"--dataset {tmp_path}/empty: .*any data files", stopped(tmp_path / "empty", tmp_path))


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_empty_or_broken_captions_file(name, tmp_path):
    (tmp_path / name).write_text("")
    message = stopped(tmp_path / name, tmp_path)
    assert (message.startswith(f"--dataset {tmp_path / name}: ")
            and len(message) > len(f"--dataset {tmp_path / name}: ") + 5)


def test_unknown_kind_of_file(tmp_path):
    (tmp_path / "a.xyz").write_text("x")
    assert "a .xyz file is not one of csv, json, jsonl, parquet, tar" in stopped(tmp_path / "a.xyz", tmp_path)
    (tmp_path / "a.tar").write_bytes(helpers.TEXT * 100)
    assert "a.tar: not a tar that can be read to its end" in stopped(tmp_path / "a.tar", tmp_path)


def test_too_few_examples(tmp_path):
    message = stopped(helpers.write_captions(tmp_path, 2), tmp_path)
    assert "--batch-size 8: larger than the 2 training examples of" in message


def test_wrong_column_of_other_layouts(tmp_path):
    helpers.write_parquet_images(tmp_path / "p" / "train.parquet", range(6))
    assert re.search("--caption-column nope: there is no such column; there are: image, caption, label",
                     stopped(tmp_path / "p", tmp_path, "--caption-column", "nope"))
    helpers.write_tar(tmp_path / "t" / "a.tar", helpers.tar_samples(range(6), "jpg", "json"))
    assert re.search("--caption-column.* there are: jpg, json", stopped(tmp_path / "t", tmp_path))


def test_no_usual_column(tmp_path):
    names = helpers.write_images(tmp_path, range(4))
    path = helpers.write_rows(tmp_path / "a.csv", ["foto", "worte"], [(x, "some words") for x in names])
    assert re.search("--image-column: none of image, .* is there; there are: foto, worte", stopped(path, tmp_path))
    assert re.search("--caption-column: none of caption, .* is there; there are: foto, worte",
                     stopped(path, tmp_path, "--image-column", "foto"))


def test_labels_in_tars_must_be_numbers(tmp_path):
    samples = {k: v | {"cls": b"cat"} for k, v in helpers.tar_samples(range(6), "jpg", "txt").items()}
    helpers.write_tar(tmp_path / "t" / "a.tar", samples)
    assert re.search("000000 of .*a.tar: .*cat", stopped(tmp_path / "t", tmp_path))


# ---------------------------------------------------- samples that cannot be read ------------------------------------
def test_a_few_bad_samples_are_replaced_counted_and_listed(finished):
    folder, summary, _, bad = finished
    assert (summary["bad_samples"] == json.loads((folder / "summary.json").read_text())["bad_samples"] == 3
            and summary["steps"] == 2)
    lines = dict(x.split("\t") for x in (folder / "bad_samples.txt").read_text(encoding="utf8").splitlines())
    missing, cut, text = bad
    assert set(lines) == set(bad)
    assert "No such file" in lines[missing] and "truncated" in lines[cut] and "cannot identify" in lines[text]


def test_too_many_bad_samples_stop_the_run(finished, tmp_path):
    _, _, csv, bad = finished
    message = stopped(csv, tmp_path, "--run-name", "b")
    assert re.search(r"3 of about 56 samples cannot be read, above --max-bad-fraction 0.01; the first: \S+: "
                     r".*/b/bad_samples.txt\)", message)
    assert any(key in message for key in bad)
    assert (tmp_path / "b" / "bad_samples.txt").read_text().count("\n") == 3


def test_captions_of_pictures_that_are_elsewhere(tmp_path):
    path = helpers.write_rows(tmp_path / "a.csv", ["image", "caption"], [(f"{i}.png", "words") for i in range(30)])
    message = stopped(path, tmp_path)
    assert re.search(r"100 samples in a row cannot be read, the first: \d+.png", message)


def test_too_many_bad_samples_stop_both_processes(finished, tmp_path):
    _, _, csv, bad = finished
    (code, said), (other, theirs) = launch.ranks(tmp_path, lambda rank: run(csv, tmp_path, "--run-name", "c"))
    # a line, not the end of a progress bar; bars that earlier tests left put the cursor up before it
    error, = [x for x in said.replace("\x1b[A", "").splitlines() if x.startswith("error:")]
    assert "3 of about 56 samples cannot be read" in error and any(k in error for k in bad)
    assert code == other == 2 and "UserError" not in said + theirs
    assert (tmp_path / "c" / "bad_samples.txt").read_text().count("\n") == 3


# ---------------------------------------------------- flags ----------------------------------------------------------
OUT_OF_RANGE = {
    "--tau 0": "must be at least 1e-12", "--tau -1": "must be at least", "--tau nan": "must be at least",
    "--tau inf": "must be at least", "--tau-min 0": "must be at least 1e-12", "--tau-min inf": "must be at least",
    "--tau-alpha -0.1": "must be at least 0", "--tau-alpha nan": "must be at least 0",
    "--chunk-size -1": "must be between 0", "--max-bad-fraction 2": "must be between 0 and 1",
    "--batch-size 1": "must be between 2", "--epochs 0": "must be at least 1e-12", "--epochs inf": "must be at least",
    "--lr nan": "must be between 0", "--beta2 1": "must be between 0 and 1", "--beta2 1.5": "must be between 0 and 1",
    "--eps inf": "must be between 1e-30", "--workers -1": "must be between 0",
    "--image-size 100000": "must be between 8 and 4096",
    "--seed -1": "must be between 0", "--jitter -1": "must be between", "--crop-min 2": "must be between 0 and 1",
    "--aug-crop-min -0.1": "must be between 0 and 1", "--flip 2": "must be between 0 and 1",
    "--aug-hue 0.7": "must be between 0 and 0.5",
    "--randaugment-magnitude 40": "must be between 0 and 30",
    "--log-every 10000000000": "must be between 0 and 1e+09"}
REFUSED = {
    "--batch-size many": "--batch-size invalid whole number value: 'many'", "--lr x": "--lr invalid number value: 'x'",
    "--mixed-precision fp8": "--mixed-precision invalid choice: 'fp8'",
    "--no-base --no-modulated --unimodal none": "leaves no loss",
    "--learnable-tau": "--learnable-tau: only with --loss infonce, slip or cwcl",
    "--loss slip --tau 1.5": "--tau-clamp",
    "--loss infonce --text-expert a/b": "--text-expert: only with --loss temo",
    "--clip-law zipf": "unknown: --clip-law zipf; near it:",  # of moving-emoji, and not of emoji
    "--dataset moving-emoji --clip-law twice": "--clip-law invalid choice: 'twice'",
    "--dataset moving-emoji --fold 3": "unknown: --fold 3; near it:", "--fold 10": "--fold 10: must be between 0 and 9",
    "--max-step 2": "unknown: --max-step 2; near it: --max-steps", "--batch 8": "unknown: --batch 8",
    "--pretrained false": "unknown: false; near it: nothing"}


@pytest.mark.parametrize("flag", OUT_OF_RANGE)
def test_number_out_of_range(flag, capsys):
    assert f"{flag}: {OUT_OF_RANGE[flag]}" in refused(capsys, *flag.split())


@pytest.mark.parametrize("flags", REFUSED)
def test_flag(flags, capsys):
    assert REFUSED[flags] in refused(capsys, *flags.split())


COLUMNS = "there is no such column; there are: image, caption"
STOPPED = {
    "--image-column nope": f"--image-column nope: {COLUMNS}", "--label-column nope": f"--label-column nope: {COLUMNS}",
    "--caption-column nope": f"--caption-column nope: {COLUMNS}",
    "--batch-size 64": "--batch-size 64: larger than the 23 training examples of .*captions.csv",
    "--image-encoder resnet_99": "resnet_99: Unknown model", "--image-encoder no/such": "no/such: ",
    "--paraphrases /no.jsonl": "--paraphrases /no.jsonl: .*/no.jsonl",
    "--text-encoder nobody/none": "nobody/none: .*connect",
    "--image-encoder resnet18-cifar --chunk-size 4": "--chunk-size 4: resnet18-cifar has BatchNorm.* chunk",
    "--lr 1e30 --lr-end 1e30 --grad-clip 0": r"the loss is not finite at step 1 \(tau 0.1\); process 0: norms "
                                             r"up to .*keys \['\d+.png'.*a lower learning rate"}


@pytest.mark.parametrize("words", STOPPED)
def test_what_ends_a_run_before_or_in_its_first_steps(words, good, tmp_path):
    assert re.match(STOPPED[words], stopped(good, tmp_path, *words.split()))


def test_batch_not_divisible_by_the_processes(good, tmp_path, monkeypatch):
    monkeypatch.setattr(data_sets.batches, "world", lambda: 3)
    assert "a batch of 8 is not divisible by 3 processes" in stopped(good, tmp_path)


@pytest.mark.parametrize("examples, batch, epochs", [(23, 20, 500), (24, 24, 500), (600, 256, 250)])
def test_own_data_take_the_batch_that_processes_share_and_500_steps(examples, batch, epochs, monkeypatch):
    """Without --batch-size; without --epochs as many whole epochs as make 500 steps, the warm-up in proportion."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    args = temo.parse_args(["--dataset", "x.csv"])
    before = args.warmup_epochs / args.epochs
    run = SimpleNamespace(args=args, train=SimpleNamespace(examples=examples, name="x"))
    said = engine.run.Run._fit(run)
    assert (args.batch_size, args.epochs) == (batch, epochs) and args.warmup_epochs / args.epochs == before
    assert (f"--batch-size 256 -> {batch}" in said) == (batch < 256) and f"-> {epochs}, which make 500 steps" in said
    asked = temo.parse_args(["--dataset", "x.csv", "--epochs", "3", "--batch-size", "20"])
    assert engine.run.Run._fit(SimpleNamespace(args=asked, train=run.train)) == "" and asked.epochs == 3
    with pytest.raises(UserError, match="--batch-size 256: larger than the 3 training examples of x"):
        engine.run.Run._fit(SimpleNamespace(args=temo.parse_args(["--dataset", "x.csv"]),
                                            train=SimpleNamespace(examples=3, name="x")))


def test_own_data_without_a_batch_size_take_what_fits(good, tmp_path, capsys):
    """And say so; a resumed run keeps it. A set with a recipe, or a --batch-size, is left alone."""
    flags = ["--dataset", good, *"--cpu --workers 0 --max-steps 1 --image-size 16".split()]
    flags += ["--output-dir", tmp_path, "--run-name", "r"]
    summary = temo.main(temo.parse_args(list(map(str, flags))))
    out = capsys.readouterr().out
    assert summary["batch"] == 23 and "; --batch-size 256 -> 23, which fits the data" in out
    assert "batch        23 = 1 x 23; 22 negatives" in out
    said = "recipe       own (ours; small towers from scratch), but --image-size by flag\n"
    assert out.startswith(f"temo.py\n  {said}")
    assert "FEW QUERIES: of " in out and " images one is worth " in out
    args = temo.parse_args(["--resume", str(tmp_path / "r")])
    assert args.batch_size == 23 and json.loads((tmp_path / "r" / "args.json").read_text())["batch_size"] == 23
    asked = [*flags[:-1], "asked", "--batch-size", "16"]
    assert temo.main(temo.parse_args([*map(str, asked)]))["batch"] == 16


def test_a_paper_s_recipe_wants_a_card_or_to_be_told(good, tmp_path, monkeypatch):
    """One line with torch's own reason; ours trains on the CPU without a word."""
    def no_card():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", no_card)
    for script, recipe in ((temo, "cc3m"), (ncl, "msrvtt")):
        flags = ["--dataset", str(good), "--recipe", recipe, "--output-dir", str(tmp_path)]
        with pytest.raises(UserError) as error:
            script.main(script.parse_args([*flags, "--eval-datasets", str(good)]))
        assert str(error.value) == (f"recipe {recipe} without a card is for --cpu; torch: The NVIDIA driver on your "
                                    "system is too old (found version 11040).")


def test_few_queries():
    said = evaluation.retrieval.table("emoji", {"captions": 80, "images": 16, "unreadable": 3}, {})
    assert said.splitlines()[-1] == "FEW QUERIES: of 16 images one is worth 6.2 points"
    assert "FEW" not in evaluation.retrieval.table("emoji", {"captions": 50, "images": 50, "unreadable": 3}, {})


# ---------------------------------------------------- runs and folders ----------------------------------------------
def test_resume_of_what_this_script_cannot_go_on_with(tmp_path, capsys):
    with pytest.raises(UserError, match=f"{tmp_path}/args.json: .*No such file"):
        temo.parse_args(["--resume", str(tmp_path)])
    (tmp_path / "args.json").write_text('{"script": "ncl", "seed": 1}')
    assert f"--resume {tmp_path}: a run of ncl.py, not of temo.py" in refused(capsys, "--resume", tmp_path)
    (tmp_path / "args.json").write_text('{"script": "temo", "se')
    with pytest.raises(UserError, match=f"{tmp_path}/args.json: "):
        temo.parse_args(["--resume", str(tmp_path)])


@pytest.mark.parametrize("words", [
    "emoji --embed-dim 32", "emoji --image-encoder resnet18", "emoji --image-size 16", "emoji --batch-size 4",
    "emoji --loss infonce", "emoji --seed 1", "emoji --dataset moving-emoji", "emoji --init-from /weights",
    "emoji --fold 3", "moving-emoji --clip-law zipf", "emoji --weight-decay 0.5", "emoji --beta2 0.5",
    "learnt --tau 0.2"])
def test_resume_with_a_changed_flag(words, tmp_path, capsys):
    dataset, flag, now = words.split()
    more = ["--loss", "infonce", "--learnable-tau"] if dataset == "learnt" else ["--dataset", dataset]
    saved = vars(temo.parse_args(more)) | {"script": "temo"}
    (tmp_path / "args.json").write_text(json.dumps(saved))
    assert f"{flag} cannot change in a run" in refused(capsys, "--resume", tmp_path, flag, now)


def test_flags_of_a_data_set_that_is_evaluated_alone_are_used(capsys):
    args = temo.parse_args("--dataset emoji --eval-datasets emoji moving-emoji --clips 50 20 10 --fold 3".split())
    _, sets = data_sets.open_data(args)
    assert [len(sets["moving-emoji"][s]) for s in ("val", "test")] == [20, 10]
    assert len(sets["emoji"]["test"]) == len(common.load_data("emoji", "test", fold=3)) != 168
    refused(capsys, "--dataset", "cc3m", "--fold=")
    with pytest.raises(SystemExit):
        temperature_schedules.parse_args(["--dataset", "emoji", "--fold", "3"])
    assert "unknown: --fold 3" in capsys.readouterr().err


def test_resume_with_another_architecture_in_the_checkpoint(finished, tmp_path):
    folder = tmp_path / "a"
    shutil.copytree(finished[0], folder)
    saved = folder / "checkpoints" / "step_2.pt"
    state = torch.load(saved, weights_only=True)
    state["model"]["vision.projection.weight"] = state["model"]["vision.projection.weight"][:8].clone()
    torch.save(state, saved)
    with pytest.raises(UserError, match=f"{saved}: ") as error:
        temo.main(temo.parse_args(["--resume", str(folder)]))
    assert "\n" not in str(error.value)


def test_run_name_of_an_existing_run(finished, good):
    folder = finished[0]
    before = (folder / "args.json").read_text()
    message = stopped(good, folder.parent, "--run-name", "a")
    assert (f"{folder}: holds a run already; --resume {folder}" in message
            and (folder / "args.json").read_text() == before)


def test_a_refused_resume_leaves_the_flags_of_the_run(finished):
    """Else the next --resume without any flag would be refused as well."""
    folder = finished[0]
    before = (folder / "args.json").read_text()
    with pytest.raises(UserError, match="beyond the 1 steps"):
        temo.main(temo.parse_args(["--resume", str(folder), "--max-steps", "1"]))
    assert (folder / "args.json").read_text() == before


@pytest.mark.parametrize("inside", ["file", "file/deeper"])
def test_output_that_cannot_be_written(inside, good, tmp_path):
    (tmp_path / "file").write_text("")
    assert re.match(f"{tmp_path / inside}.*: .*Not a directory", stopped(good, tmp_path / inside))


# ---------------------------------------------------- models ---------------------------------------------------------
def test_weights_that_do_not_fit(good, tmp_path):
    save_file({"other": torch.zeros(2)}, tmp_path / "w.safetensors")
    message = stopped(good, tmp_path, "--init-from", tmp_path / "w.safetensors")
    assert "none of its 1 tensors fits the model; its first names are ['other'], the model's ['" in message
    (tmp_path / "w.pt").write_bytes(helpers.TEXT)
    message = stopped(good, tmp_path / "b", "--init-from", tmp_path / "w.pt")
    assert f"--init-from {tmp_path / 'w.pt'}: " in message


@pytest.mark.parametrize("script, words, refused", [
    (temo, "--loss infonce --no-modulated", "--no-modulated: only with --loss temo"),
    (temo, "--aug-hue 0", "--aug-hue: only with --image-aug simclr or --loss slip"),
    (temo, "--loss infonce --image-aug simclr --aug-hue 0", "--image-aug: only with I~ and T~"),
    (temo, "--unimodal none --paraphrases p.jsonl", "--paraphrases: only with I~ and T~"),
    (temo, "--loss slip --grad-augmented", "--grad-augmented: only with I~ and T~ (--loss temo and --unimodal)"),
    (temo, "--row e --grad-augmented", "--grad-augmented: only with I~ and T~ (--loss temo and --unimodal)"),
    (temo, "--row a --blend fixed", "--blend: only with L_MM and another term of --loss temo"),
    (temo, "--paraphrase-anchor", "--paraphrase-anchor: only with --paraphrases"),
    (temo, "--loss ts --row e", "--row: only with --loss temo, without experts"),
    (temo, "--row c --similarity cosine", "--similarity: only with --loss temo (a modulated term)"),
    (temo, "--loss ts --tau 0.1", "--tau: only with L_MM, --unimodal plain, or --loss infonce, cwcl or slip"),
    (temo, "--no-base --tau 0.1", "--tau: only with L_MM"),
    (ncl, "--optimizer sgd --beta2 0.9", "--beta2: only with --optimizer adamw or adam"),
    (mama, "--lr-schedule constant --lr-end 0", "--lr-end: only with --lr-schedule cosine or linear"),
    (temperature_schedules, "--schedule fixed --tau-max 0.5", "--tau-max: only without --schedule fixed"),
    (temperature_schedules, "--tau-head 1 --tau-tail 0.1 --schedule step", "--schedule: only without --tau-head"),
    (temo, "--row c --tau-min 0.1", "--tau-min: only with --loss temo (a modulated term, or an expert), ts or"),
    (temo, "--loss cwcl --tau-alpha=0.1", "--tau-alpha: only with --loss temo (a modulated term, or an expert), ts or"),
    (temo, "--loss ts --detach-tau", "--detach-tau: only with --loss temo (a modulated term) or"),
    (temo, "--tau-clamp 0.001 0.5", "--tau-clamp: only with --learnable-tau"),
    (mmts, "--tau 0.1", "--tau: only with --loss infonce --no-shifts"),
    (mmts, "--no-shifts --tau 0.1 --margin 0.1", "--margin: only with --loss max-margin --no-shifts"),
    (mmts, "--no-shifts --tau 0.1 --shift-max 1", "--shift-max: only with --shifts"),
    (mmts, "--no-schedule --periods 3", "--periods: only with --schedule"),
    (mmts, "--clusters noun --num-clusters 9", "--num-clusters: only with --clusters captions or vision"),
    (ncl, "--margin 0.1", "--margin: only with --loss max-margin"),
    (temperature_schedules, "--prune 0.9", "--prune: only with --loss sdclr"),
    (temperature_schedules, "--queue-size 9", "--queue-size: only with --loss moco"),
    (temperature_schedules, "--loss moco --head-norm none", "--head-norm: only with --loss simclr or sdclr")])
def test_a_flag_of_another_loss_is_refused(script, words, refused, capsys):
    """Where the command line has it, be it at its default; a recipe's own values are not refused."""
    with pytest.raises(SystemExit) as end:
        script.parse_args(words.split())
    assert end.value.code == 2 and capsys.readouterr().err.startswith(f"error: {refused}")


@pytest.mark.skipif(find_spec("wandb") is not None, reason="it is installed")
def test_missing_tracker(good, tmp_path):
    assert "--tracker wandb: not installed: pip install wandb" in stopped(good, tmp_path, "--tracker", "wandb")


# ---------------------------------------------------- numbers that explode ------------------------------------------
def test_nan_weights_stop_at_the_first_step(good, tmp_path, capsys):
    save_file({"vision.projection.weight": torch.full((16, 128), float("nan"))}, tmp_path / "nan.safetensors")
    message = stopped(good, tmp_path, "--init-from", tmp_path / "nan.safetensors")
    assert re.search(r"the loss is not finite at step 0 \(tau 0.1\); .*norms up to nan.*keys \['\d+.png'", message)


# ---------------------------------------------------- the command line -----------------------------------------------
@pytest.mark.parametrize("script", [temo, ncl, mmts, mama, temperature_schedules])
def test_the_command_prints_one_line_and_ends_with_2(script, monkeypatch, tmp_path):
    """In a process of its own, which clean_exit ends."""
    monkeypatch.setattr(sys, "argv", [script.__file__, "--dataset", "/no/such"])
    process = launch.forked(lambda: runpy.run_path(script.__file__, run_name="__main__"), tmp_path / "said")
    assert launch.ended(process) == 2
    said = (tmp_path / "said").read_text()
    assert said.startswith("error: --dataset /no/such: no such file or folder") and said.count("\n") == 1


HELP = [(temo, "--batch-size", {"cc3m": 2048, "cc12m": 4096, "emoji": 256}),
        (ncl, "--epochs", {"msrvtt": 5.0, "msvd": 3.0, "activitynet": 10.0}),
        (mmts, "--alpha", {"cc3m": 0.04, "epic-kitchens-100": 0.2, "youcook2": 0.06}),
        (mama, "--epochs", {"msrvtt": 5.0, "didemo": 20.0}), (temperature_schedules, "--period", {"emoji": 12.0})]


@pytest.mark.parametrize("script, flag, defaults", HELP, ids=["temo", "ncl", "mmts", "mama", "ts"])
def test_help(script, flag, defaults, monkeypatch, capsys):
    """At most 200 lines of a terminal of 80 columns, the method first, with the effective defaults."""
    monkeypatch.setenv("COLUMNS", "80")
    for dataset, value in defaults.items():
        with pytest.raises(SystemExit) as stop:
            script.parse_args(["--dataset", dataset, "--help"])
        text = capsys.readouterr().out
        assert stop.value.code == 0 and len(text.splitlines()) <= 200 and "%(" not in text and "[]" not in text
        assert text.split("\n\n")[3].startswith("method:")
        assert re.search(rf"  {flag} X [^\[]* \[{value}\]", re.sub(r"\s+", " ", text).replace(flag, f" {flag}"))
        options = re.findall(r"^  (--\S+)", text, re.M)
        assert all(re.fullmatch(r"--(\[no-\])?[a-z0-9]+(-[a-z0-9]+)*", o) for o in options)


def test_resume_remembers_changed_flags_and_refuses_fewer_steps(good, tmp_path, capsys):
    run(good, tmp_path, "--run-name", "r")
    folder = ["--resume", str(tmp_path / "r")]
    assert temo.main(temo.parse_args([*folder, "--max-steps", "4"]))["steps"] == 4
    assert temo.parse_args(folder).max_steps == 4
    with pytest.raises(UserError, match="step_4.pt: is beyond the 3 steps"):
        temo.main(temo.parse_args([*folder, "--max-steps", "3"]))
    longer = temo.parse_args([*folder, "--epochs", "50"])
    assert (longer.epochs, longer.max_steps) == (50, 0)  # the saved number of steps would win
    for flag in ("--run-name", "--output-dir"):
        assert f"{flag} cannot change in a run" in refused(capsys, *folder, flag, "x")


def test_one_process_says_which_flag_is_wrong(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit, match="2"):
        temo.parse_args(["--tau", "0"])
    assert not capsys.readouterr().err
