"""The result of an evaluation as lines of text."""

import re
from pathlib import Path

from contrastive.core.files import flatten
from contrastive.core.words import counted

# numbers of queries; of fewer than WARN_BELOW a table warns
QUERY_COUNTS = ("clips", "images", "captions", "questions")
# all metrics that count something; they stand in the first line of a table
COUNTS = (
    *QUERY_COUNTS, "identical_clips", "identical_images", "captions_cut", "prompts_cut",
    "repeated_captions_positive", "repeated_captions_wrong", "texts_cut", "unreadable",
    "without_class")
WARN_BELOW = 50  # with fewer, a single query moves the numbers
# what groups of numbers are called in a table, where their name in summary.json does not say it
LABELS = {
    "": "both ways",
    "few-shot": "few-shot probe",
    "all": "probe on all of train",
    "normalize/none": "by cosine",
    "normalize/queue": "biases queue",
    "normalize/oracle": "biases oracle",
    "normalize/dsl": "dual softmax"}


def table(title, metrics, chance):
    """A table of metrics, one line for each group, each number with its chance level in brackets.

    Args: metrics, chance: as `measure` returns them.
    """
    counts = shown_counts(metrics)
    shown = ", ".join(counted(n, name) for name, n in counts.items())
    lines = [f"{title}: {shown}; in brackets: chance"]
    lines += lines_of_groups(metrics, chance)
    if "repeated_captions_wrong" in counts:
        item = "video" if "clips" in metrics else "image"
        lines.append(f"  repeated captions: another {item} has the same words; in text -> {item} "
                     "nothing tells them apart")
    warnings = []
    for name in QUERY_COUNTS:
        if name in counts and counts[name] < WARN_BELOW:
            points = 100 / counts[name]
            words = counted(counts[name], name)
            warnings.append(f"one of {words} is worth {points:.1f} points")
    if warnings:
        lines.append("FEW QUERIES: " + ", ".join(warnings))
    return "\n".join(lines)


def shown_counts(metrics):
    """{name: number} of the counts above 0; the number of clips stands for that of images."""
    counts = {}
    for name in COUNTS:
        if name == "images" and "clips" in metrics:
            continue
        if metrics.get(name):
            counts[name] = metrics[name]
    return counts


def lines_of_groups(metrics, chance):
    """A line for each group of numbers."""
    measured = {name: value for name, value in metrics.items() if name not in COUNTS}
    chance_levels = flatten(chance)
    groups = {}
    chosen_biases = f"normalize/{metrics.get('normalized_by')}/"
    for path, value in flatten(measured).items():
        group, _, name = path.rpartition("/")
        # biases change no chance level, and the numbers with the chosen ones stand above
        path_of_chance = re.sub("^normalize/[^/]*/", "", path)
        if path.startswith(chosen_biases) and path_of_chance in chance_levels:
            continue
        cell = f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}"
        if path_of_chance in chance_levels:
            cell += f" ({chance_levels[path_of_chance]:.2f})"
        groups.setdefault(group, []).append(cell)
    lines = []
    for group, cells in groups.items():
        row = f"{label_of(group):<24} {'  '.join(cells)}".replace("_to_", " -> ")
        if "clips" in metrics:
            row = row.replace("image ->", "video ->").replace("-> image", "-> video")
        lines.append(f"  {row}")
    return lines


def label_of(group):
    """The words for a group of numbers: 'biases queue: error' of 'normalize/queue/error'."""
    words = LABELS.get(group)
    if words is None:
        first, _, last = group.rpartition("/")
        words = last
        if first:
            words = f"{LABELS.get(first, first)}: {last}"
    return words.replace("_to_", " -> ").replace("_", " ")


def val_line(val):
    """The main number of each data set of an evaluation on val, or "" if there is none:

        val  R@1 10.0 / 10.2        text -> image / image -> text
        val  accuracy 40.0          of answers
        val  kNN@1 30.0             without texts
    """
    parts = []
    for name, metrics in val.items():
        if "text_to_image" in metrics:
            text_recall = metrics["text_to_image"]["R@1"]
            image_recall = metrics["image_to_text"]["R@1"]
            part = f"R@1 {text_recall:.1f} / {image_recall:.1f}"
        elif "accuracy" in metrics:
            part = f"accuracy {metrics['accuracy']:.1f}"
        elif "knn@1" in metrics:
            part = f"kNN@1 {metrics['knn@1']['top1']:.1f}"
        else:
            continue
        if len(val) > 1:
            part += f" ({Path(name).name})"
        parts.append(part)
    if not parts:
        return ""
    return f"val  {', '.join(parts)}"


def report(summary, folder):
    """The text at the end of a run: a table for each set, the speed, and the folder of the run."""
    lines = []
    for name, metrics in summary["test"].items():
        lines.append(table(f"\n{name} (test)", metrics, summary["chance"][name]))
    lines.append("")
    lines.append(f"{summary['steps']} steps, {summary['wall_s']:.0f} s, "
                 f"{summary['samples_per_s']:.0f} samples/s with evaluations, "
                 f"peak memory {summary['peak_memory_mib']:.0f} MiB, "
                 f"{summary['bad_samples']} bad samples")
    lines.append(f"run folder: {folder}")
    return "\n".join(lines)
