"""Annotation files of the named sets: finds them below --data-dir and compares their counts with the papers'."""

from pathlib import Path

from contrastive.engine.base import UserError, say


def check_split(name, split, splits, hint=""):
    """Raises UserError if a set has no such split."""
    if split not in splits:
        raise UserError(f"{name} has no {split} split; it has: {', '.join(splits)}{hint}")


def annotation_root(name, files, options):
    """The folder of the annotation files: --data-dir, else --video-dir. files: {split: [(name or pattern, reader)]}."""
    root = options.get("data_dir") or options.get("video_dir")
    if not root:
        patterns = ", ".join(pattern for of_split in files.values() for pattern, _ in of_split)
        raise UserError(f"--dataset {name} needs --video-dir (the folder of its videos) and --data-dir (its annotation "
                        f"files: {patterns})")
    return Path(root).expanduser()


def annotation_file(name, split, files, root):
    """(annotation file of a split, its reader): the first of `files` that exists below `root`."""
    for pattern, reader in files[split]:
        if file := find_file(root, pattern):
            return file, reader
    patterns = ", ".join(pattern for pattern, _ in files[split])
    raise UserError(f"{name} ({split}): none of {patterns} is in {root}; --data-dir names the folder of the annotation "
                    "files")


def find_file(root, *patterns):
    """The first file below a folder with one of these names or patterns, tried in order; None if there is none."""
    return next((f for pattern in patterns for f in sorted(root.rglob(pattern)) if f.is_file()), None)


def count_note(name, split, found, expected, what="examples"):
    """A warning, printed and returned for the note, if a split's count differs from the papers'; else ""."""
    if found == expected:
        return ""
    say(f"WARNING: {name} ({split}) has {found:,} {what}, {expected:,} are expected: the numbers are not comparable "
        "with the papers'")
    return f"WARNING: {found:,} {what}, {expected:,} expected"
