"""What a run prints before training: what its flags amount to."""

import math

from contrastive.core.processes import world_size
from contrastive.core.words import counted, short_path
from contrastive.engine.flags import words_of

import torch

METHOD_WIDTH = 84  # characters of a line of method flags
NEXT_LINE = "\\\n               "  # a backslash, and the command goes on below the first flag


def banner(run, lines):
    """The text of the banner.

    Args:
        run: the Run, with its data, model and evaluator.
        lines: {title: text} of the script.
    """
    texts = {
        "recipe": recipe_line(run),
        "data": data_line(run),
        "evaluation": evaluation_line(run),
        "model": model_line(run),
        "processes": processes_line(run),
        "batch": batch_line(run),
        "steps": steps_line(run),
        "method": method_line(run),
        **lines,
        "run": run.folder}
    rows = [f"{run.script}.py"]
    for title, text in texts.items():
        if text:
            rows.append(f"  {title:<12} {text}")
    return "\n".join(rows)


def recipe_line(run):
    """The recipe, whose values it has, and which flags change it."""
    args = run.args
    source = args.recipe_source
    missing = missing_inputs(run)
    if missing:
        source = f"WITHOUT {missing}, which the data lack; otherwise {source}"
    line = f"{args.recipe} ({source})"
    if args.changed:
        line += f", changed by {', '.join(args.changed)}"
    if args.recipe == "own" and "frozen" in args.recipes:
        line += "; another: --recipe frozen"
    return line


def missing_inputs(run):
    """What --modalities asks for beside frames and the data do not have, in words; "" = nothing."""
    asked = getattr(run.args, "modalities", "")
    read = run.model.spec.get("modalities", asked)
    names = {"a": "SOUND", "s": "SUBTITLES"}
    return " AND ".join(names[letter] for letter in asked if letter not in read)


def data_line(run):
    """The training set, its size and its note."""
    line = f"{run.args.dataset}: {len(run.train):,} training examples"
    if run.train.note:
        line += f"; {run.train.note}"
    return line


def evaluation_line(run):
    """The sizes of the splits that are evaluated, with notes that the training set lacks."""
    sets = []
    for name, splits in run.evals.items():
        sizes = []
        earlier = run.train.note  # what stands in the banner already
        for data in splits.values():
            size = f"{len(data):,} {data.split}"
            note = new_notes(data.note, earlier)
            if note:
                size += f" ({note})"
            sizes.append(size)
            warnings = [part for part in note.split("; ") if "WARNING" in part]
            earlier = "; ".join([earlier, *warnings])
        sets.append(f"{name}: {', '.join(sizes)}")
    if run.eval_every:
        sets.append(f"val every {counted(run.eval_every, 'steps')}")
    return "; ".join(sets)


def new_notes(note, other_note):
    """The parts of a note that another one does not have."""
    parts = [part for part in note.split("; ") if part not in other_note.split("; ")]
    return "; ".join(parts)


def model_line(run):
    """The encoders, their size and their first weights."""
    tower, _, _ = run.evaluator.towers
    names = f"images {short_path(run.args.image_encoder)}"
    if tower.text:
        names += f", texts {short_path(run.args.text_encoder)}"
    if tower.spec.get("modalities"):
        names += f", modalities {tower.spec['modalities']}"
    return f"{names}: {run.num_parameters / 1e6:.1f} M parameters; {tower.weights_in_words}"


def processes_line(run):
    """The processes, their threads and loader workers, and the precision."""
    threads = counted(torch.get_num_threads(), "threads")
    workers = counted(run.data.workers, "loader workers")
    return (f"{world_size()} on {run.device}, each with {threads} and {workers}; mixed precision "
            f"{run.args.mixed_precision}")


def batch_line(run):
    """The global batch, and the loss of a random guess."""
    batch_size = run.args.batch_size
    line = f"{batch_size} = {world_size()} x {batch_size // world_size()}"
    if run.args.chunk_size:
        line += f" in chunks of {run.args.chunk_size}"
    if not hasattr(run.args, "text_encoder"):  # a loss of images alone has other candidates
        return line
    return f"{line}; InfoNCE of a random guess: ln {batch_size} = {math.log(batch_size):.3f}"


def steps_line(run):
    """The steps, the warm-up and the learning rate."""
    args = run.args
    steps = run.steps
    line = f"{steps.total:,} ({steps.total / steps.per_epoch:.1f} epochs of {steps.per_epoch:,}), "
    line += f"of which {steps.warmup} are warm-up; lr {args.lr:g}"
    if args.lr_schedule != "constant":
        line += f" -> {args.lr_end:g}"
    return f"{line}, {args.lr_schedule}"


def method_line(run):
    """The flags of the group 'method' with their values, as a command line that can be pasted."""
    lines = [""]
    for name in run.args.method_flags:
        words = words_of(name, getattr(run.args, name))
        if words and len(lines[-1]) + len(words) > METHOD_WIDTH:
            lines.append("")
        if words:
            lines[-1] += words + " "
    return NEXT_LINE.join(lines).rstrip()
