"""One data set under evaluation by eval.py: what its tasks share, their numbers, and the lines that show them."""

import argparse
import dataclasses
import functools

import common
from common import UserError

import numpy as np
import torch

from tools import answers, by_class, check


class Case:
    """One data set under evaluation: what its tasks share, and their numbers. Collective.

    Attributes: data; metrics, chance: {task: numbers}."""

    def __init__(self, subject, name, options):
        self.subject, self.args, self.name, self.options = subject, subject.args, name, options
        self.sets = None
        self.metrics, self.chance, self.encoded, self.known = {}, {}, {}, {}
        args, own = subject.args, subject.own
        if "imbalance_ratio" in own and name == own["dataset"]:
            # temperature_schedules.py or its fork: the run's long tail, its held-out images, the classes it counts
            self.sets = common.labelled_splits(argparse.Namespace(**own | options))
        data = self.open(args.split)
        common.guard("say_part", data, own.get("dataset"))
        if data.streamed:
            raise UserError(f"--split {args.split}: {name} is a stream there; use --split val or test")
        self.changed = []
        if own and not common.rank():
            self.changed = check.since_training(args.checkpoint, self.key_of(args.split), data)
        if args.limit:
            data = data.select(np.arange(min(args.limit, len(data))), args.split)
        if data.note:
            common.say(f"\n{name} ({args.split}): {data.note}")
        self.data = data = dataclasses.replace(data, max_captions=args.max_captions or data.max_captions)
        self.images(next((t for t in args.tasks if t in by_class.TASKS or data.has_captions), args.tasks[0]))

    def open(self, split):
        """That split of the data set, as the run had it: without its meta-data and what --verify-images left out."""
        data = self.sets[split] if self.sets else common.load_data(self.name, split, **self.options)
        learnt = set(self.subject.meta_data.get(self.key_of(split), ()))
        data = data.select([i for i, key in enumerate(data.keys()) if key not in learnt]) if learnt else data
        bad = self.subject.unreadable.get(self.key_of(split))
        return common.leave_out(data, bad) if bad else data

    def key_of(self, split):
        """What data.json, meta_data.json and unreadable.json of the run call a split."""
        return "train" if split == "train" and self.name == self.subject.own.get("dataset") else f"{self.name} {split}"

    def images(self, task):
        """index (M,) of the rows that could be read, image (M, D), features (M, width), as this task sees them."""
        view = self.subject.view(task, self.name)
        if view not in self.encoded:
            *found, bad = self.subject.images(self.data, view)
            if not self.encoded:
                common.say_unreadable(self.data, bad)
                self.metrics |= {"images": len(found[0]), "unreadable": len(bad)}
                self.metrics |= {"clips": len(found[0])} if common.has_clips(self.data) else {}
            self.encoded[view] = found
        if view != ("own", "own"):
            self.metrics.setdefault("views", {})[task] = dict(zip(("resize", "stats"), view))
        return self.encoded[view]

    def labelled(self, task):
        """image (M, D), features (M, width), labels (M,) of the images that have a class."""
        index, image, features = self.images(task)
        labels = np.asarray(self.data.labels)[index]
        known = torch.from_numpy(labels >= 0)
        if not known.all():
            self.metrics["without_class"] = int((~known).sum())
        return image[known], features[known], torch.from_numpy(labels)[known]

    @functools.cached_property
    def pieces(self):
        """common.retrieval_pieces of the set: images and all their captions."""
        subject, (index, image, _) = self.subject, self.images("retrieval")
        towers = subject.model, subject.tokenizer
        pieces = common.retrieval_pieces(*towers, self.data, index, image, subject.device)
        self.metrics["captions"] = len(pieces["text"])
        return pieces

    def check(self, task):
        """Raises: UserError that says why the set cannot have this task; common.NotFinite where its numbers mean
        nothing."""
        if task in ("retrieval", "gap", "histograms", "mir") and not self.data.has_captions:
            raise UserError("the set has no captions")
        if task in by_class.TASKS and self.data.labels is None:
            raise UserError("the set has no labels")
        if task in by_class.TASKS and not len(self.labelled(task)[2]):
            raise UserError("none of its images has a class")
        if task in ("knn", "probe") and self.args.split == "train":
            raise UserError("--split train: each image would be found among the training images")
        if task == "qa" and not hasattr(self.subject.model, "answers"):
            raise UserError("the model answers no questions")
        if task not in ("knn", "probe", "qa"):
            answers.refuse_untrained(self.subject.model)
        if task not in ("knn", "probe") and not self.subject.tokenizer:
            raise UserError("the model has no text encoder")
        if task in ("gap", "histograms") and not all(self.pieces[k].isfinite().all() for k in ("image", "text")):
            raise common.NotFinite("embeddings hold non-finite values")

    def train(self, task):
        """Features (K, width) and labels (K,) of the training images that have a class, encoded once in each view, as
        the run itself sees them (--train-features). Raises: UserError without a training set."""
        view = self.subject.view(task, self.name)
        if view not in self.known:
            train = self.open("train")
            if train.streamed:
                raise UserError("the training set is a stream: no kNN or probe")
            if train.label_names != self.data.label_names:
                raise UserError("train and test name different classes")
            if self.sets and self.subject.own.get("train_features") == "augmented":
                train = common.padded_and_flipped(train, self.subject.own["seed"])
            self.known[view] = self._features(train, view)
        return self.known[view]

    def few_shot(self, task):
        """The same of the images that the run's few-shot probe learns from (--few-shot-file), or None."""
        listed = self.sets and "few-shot" in self.sets and not self.args.few_shot
        return self._features(self.sets["few-shot"], self.subject.view(task, self.name)) if listed else None

    def _features(self, data, view):
        rows, _, features, _ = self.subject.images(data, view)
        labels = np.asarray(data.labels)[rows]
        (labels,), (features,) = common.with_class((labels,), (features,))
        return features, torch.from_numpy(labels)

    def picture(self, kind):
        """Path of a picture of this set."""
        return self.subject.folder / f"{kind}_{common.slug(self.name)}.{self.args.figures}"


def table(name, metrics, chance, tasks):
    """One data set's result as lines, every number beside its chance level where it has one."""
    by_chance = common.flatten(chance)
    captions = f", {metrics['captions']} captions" if "captions" in metrics else ""
    unknown = f", {metrics['without_class']} without a class" if "without_class" in metrics else ""
    clips = "clips" in metrics
    number = f"{metrics['clips']} clips" if clips else f"{metrics['images']} images"
    lines = [f"\n{name}: {number}{captions}{unknown}"]
    for task in tasks:
        groups = {}
        for key, value in common.flatten(metrics.get(task, {})).items() if task != "histograms" else ():
            group, _, last = key.rpartition("/")
            groups.setdefault(group, []).append(_cell(last, value, by_chance.get(f"{task}/{key}")))
        view = metrics.get("views", {}).get(task)
        if groups and view:
            lines.append(f"  {task}: images seen as {view['resize']}, statistics {view['stats']}")
        for group, cells in groups.items():
            label = f"{task} {group.replace('_', ' ')}".strip()
            label = label.replace("image", "video") if clips else label
            lines.append(f"  {label:<26} {'  '.join(cells)}")
    few = common.few_queries(texts=metrics.get("captions", 0), images=metrics["images"])
    return "\n".join(lines + ([f"  {few}"] if few else []))


def _cell(name, value, chance):
    number = f"{value:.2f}" if isinstance(value, float) else f"{value}"
    return f"{name} {number}" + ("" if chance is None else f" ({chance:.2f})")
