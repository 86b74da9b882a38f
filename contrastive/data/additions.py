"""Captions and pairs of other files that are added to a training set, captions that are exchanged,
and rows that an evaluation leaves out because they were trained on."""

import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

from contrastive.core.processes import UserError, opening
from contrastive.data.annotations import without_ending
from contrastive.data.table import EmptySplit, with_column, with_note
from contrastive.data.table_files import find_column, read_table
from contrastive.data.user_data import captions_of_rows, texts_of, windows_of_rows

import numpy as np

NOISE_SEED = [7, 2]  # draws the rows whose captions are exchanged
QUESTION_COLUMNS = ("question", "answer", "choices", "question_type")


# ---- sets that are evaluated alone ----
def without_trained(data, *training_sets):
    """A split without the rows whose image or video file is in the training sets, which are counted
    in its note. Files inside tables and tars are not compared, of which the note warns.

    Args:
        data: the split.
        training_sets: Data.
    Raises: EmptySplit if no row is left.
    """
    if not training_sets or data.pixels is not None:
        return data
    if any(map(holds_files_inside, (data, *training_sets))):
        data = with_note(data, "WARNING: files inside tables and tars are not compared with those "
                               "trained on")
    trained_files = set()
    for train in training_sets:
        trained_files.update(file_of_rows(train))
    rows = []
    for row, file in enumerate(file_of_rows(data)):
        if file is None or file not in trained_files:
            rows.append(row)
    num_trained = len(data) - len(rows)
    if not num_trained:
        return data
    if not rows:
        raise EmptySplit(f"{data.full_name}: all of its {len(data):,} rows were trained on")
    return with_note(
        data.select(rows), f"{num_trained:,} rows left out, whose files were trained on")


def holds_files_inside(data):
    """Whether the first file of a set is inside a table or a tar."""
    return data.sources is not None and path_of_source(data.sources[0]["source"]) is None


def file_of_rows(data):
    """The real path of the file of each row; None if it is inside a table or a tar."""
    if data.sources is None:  # pixels in memory
        return []
    files = []
    for source in data.values_of_column("source"):
        path = path_of_source(source)
        files.append(path and os.path.realpath(path))
    return files


def path_of_source(source):
    """The path of a source that is a file; None if it is inside a table or a tar."""
    if source.get("bytes") or source.get("size") is not None:
        return None
    return source.get("path") or None


# ---- clips of several data sets ----
class Clip(NamedTuple):
    """What identifies an image or a clip in two data sets."""

    file: Path  # its key if it lies inside a table or a tar
    start: float | None
    end: float | None


def clips_of_data(data):
    """Yields the Clip of each row."""
    for key, source in zip(data.keys(), data.values_of_column("source")):
        path = path_of_source(source) or key
        yield Clip(Path(path), source.get("start"), source.get("end"))


# ---- further captions ----
def add_captions(data, file):
    """The data with further captions from a table with the columns video (or image), caption and,
    of windows, start and end.

    A clip is found by its window and its file name without folders and suffix. A question that
    served as the caption is replaced.
    Raises: UserError if no row of the file has a clip, or one has several.
    """
    flag = f"--extra-captions {file}"
    if data.sources is None:
        raise UserError(f"{flag}: {data.name} has no files of its own to which captions could "
                        "belong")
    with opening(flag):
        additions = read_captions(file)  # {(name, start, end): captions}
    new_captions = {}  # {(stem, start, end): captions}
    names = {}  # {(stem, start, end): name in the file}
    for (name, start, end), texts in additions.items():
        window = (without_ending(Path(name).name), start, end)
        new_captions.setdefault(window, []).extend(texts)
        names.setdefault(window, name)

    captions = list(data.column("captions"))
    questions = data.column("question") or [None] * len(data)
    files = {}  # {(stem, start, end): file}
    num_added = 0
    for row, clip in enumerate(clips_of_data(data)):
        window = (without_ending(clip.file.name), clip.start, clip.end)
        if window not in new_captions:
            continue
        first_file = files.setdefault(window, clip.file)
        if first_file != clip.file:
            raise UserError(f"{flag}: {names[window]} may be any of {first_file}, {clip.file}")
        new = [text for text in new_captions[window] if text not in captions[row]]
        num_added += len(new)
        if not new or captions[row] != [questions[row]]:
            new = captions[row] + new
        captions[row] = new
    unmatched = [names[window] for window in names if window not in files]
    if not files:
        raise UserError(f"{flag}: none of its {len(additions):,} rows matches a clip of "
                        f"{data.full_name}, first {unmatched[0]}; names and windows "
                        "(start, end) must agree")
    data = with_column(data, "captions", captions)
    data = with_note(data, f"{num_added:,} captions added from {Path(file).name}")
    if unmatched:
        data = with_note(data, f"{len(unmatched):,} of its rows match no training clip, "
                               f"first {unmatched[0]}")
    return data


def read_captions(file):
    """{(name, start, end): captions} of a table of further captions."""
    table = read_table(Path(file).expanduser())
    image = find_column("--image-column", "", table.column_names)
    caption = find_column("--caption-column", "", table.column_names)
    names = texts_of(table, image)
    captions = captions_of_rows(table, caption)
    additions = {}
    for *window, texts in zip(names, *windows_of_rows(table), captions):
        additions.setdefault(tuple(window), []).extend(filter(None, texts))
    return additions


# ---- exchanged captions ----
def add_caption_noise(data, fraction):
    """The data in which a fraction of the rows have the captions of another row (--caption-noise).

    The rows and the captions that they get are the same in all runs. The column noisy marks them.
    Raises: UserError for data without captions.
    """
    import datasets

    if not data.has_captions:
        raise UserError(f"--caption-noise {fraction:g}: {data.name} has no captions to exchange")
    captions = data.column("captions")
    contents = description_numbers(data)                                    # (M,)
    source_rows = exchange_rows(contents, fraction)                         # (M,)
    is_noisy = []
    for row, source_row in enumerate(source_rows):
        is_noisy.append(captions[row] != captions[source_row])
    data = with_column(data, "captions", [captions[row] for row in source_rows])
    data = with_column(data, "noisy", is_noisy, datasets.Value("bool"))
    return with_note(data, f"{sum(is_noisy):,} examples with another's captions")


def description_numbers(data):
    """(M,) equal numbers of rows that show the same: verb and noun where the data have them, else
    their captions."""
    if data.column("verb") is not None and data.column("noun") is not None:
        descriptions = list(zip(data.column("verb"), data.column("noun")))
    else:
        descriptions = [tuple(captions) for captions in data.column("captions")]
    numbers = {}
    return np.array([numbers.setdefault(words, len(numbers)) for words in descriptions])


def exchange_rows(contents, fraction):
    """(M,) the row whose captions each row gets: its own, or, for a fraction of the rows, a row of
    another content (if any is left).

    Args:
        contents: (M,) numbers.
    """
    source_rows = np.arange(len(contents))
    permutation = np.random.default_rng(NOISE_SEED).permutation(len(contents))
    rows = permutation[:round(fraction * len(contents))]
    sources = np.roll(rows, 1)
    for k in np.flatnonzero(contents[rows] == contents[sources]):
        is_right = contents[sources] == contents[rows[k]]                   # (n,) for row k
        would_be_right = contents[rows] == contents[sources[k]]             # (n,) for the others
        partners = np.flatnonzero(~is_right & ~would_be_right)
        if len(partners):  # sources are swapped with the first row for which both then differ
            partner = partners[0]
            sources[[k, partner]] = sources[[partner, k]]
    source_rows[rows] = sources
    return source_rows


# ---- further pairs ----
def add_pairs(data, pairs, evaluation_sets, flag):
    """The training data followed by those of another set, without the clips that are evaluated.

    In a set of questions the added rows have none (None).

    Args:
        pairs: Data with captions.
        evaluation_sets: {name: {split: Data}}.
        flag: what the user gave, for error messages.
    """
    import datasets

    check_pairs(data, pairs, flag)
    evaluated = evaluated_names(evaluation_sets)
    names = names_of_clips(pairs)
    rows = [row for row, name in enumerate(names) if name not in evaluated]
    num_dropped = len(pairs) - len(rows)
    pairs = pairs.select(rows)

    columns = ["source", "captions", "key"]
    if "noisy" in pairs.table.column_names:  # --caption-noise holds for both
        columns.append("noisy")
    question_columns = [name for name in QUESTION_COLUMNS if name in data.table.column_names]
    with opening(flag):  # the sources of tars and of files differ
        table = datasets.concatenate_datasets([
            data.table.select_columns(columns + question_columns),
            pairs.table.select_columns(columns)])
    caption_numbers = None
    if data.caption_numbers is not None:
        caption_numbers = np.concatenate([data.caption_numbers, pairs.caption_numbers])
    data = dataclasses.replace(
        data, table=table, rows=None, shards=None, caption_numbers=caption_numbers,
        before_extra_pairs=data.before_extra_pairs or data)
    share = len(pairs) / len(table)
    data = with_note(
        data, f"{len(pairs):,} more pairs from {pairs.name}, {share:.0%} of an epoch", pairs.note)
    if num_dropped:
        data = with_note(data, f"{num_dropped:,} of clips that the evaluation reads left out")
    return data


def check_pairs(data, pairs, flag):
    """Raises UserError unless both sets are files of the same kind."""
    has_files = data.sources is not None and pairs.sources is not None
    same_kind = type(data.clip) is type(pairs.clip)
    if not has_files or not same_kind or not pairs.has_captions or data.sentences is not None:
        raise UserError(f"{flag}: only joins files with captions, videos to videos or images to "
                        "images")


def evaluated_names(evaluation_sets):
    """names_of_clips of all clips in {name: {split: Data}}."""
    names = set()
    for splits in evaluation_sets.values():
        for data in splits.values():
            if data.sources is not None:
                names.update(names_of_clips(data))
    return names


def names_of_clips(data):
    """The file name of each row's clip without folders and ending, and without the v_ that some
    sets write before the id of a video."""
    names = []
    for clip in clips_of_data(data):
        names.append(without_ending(clip.file.name).removeprefix("v_"))
    return names
