"""The evaluation of a split: `measure` does the TASKS that its data and the model support.

    retrieval   exact ranks in both directions
    mir         multi-instance retrieval, as EPIC-KITCHENS-100 scores it
    gap         the modality gap, and the health of the space
    zero-shot   the nearest class, by prompts
    knn         the nearest training images
    probe       linear classifiers
    qa          answers to questions

Evaluator does it for all sets of a run, or of eval.py.
"""

import dataclasses
from typing import NamedTuple

from contrastive.core.processes import UserError
from contrastive.data.table import Data, frames_of
from contrastive.encoders.transform import EvalTransform
from contrastive.evaluation.by_class import (
    FeatureOptions, LabelledFeatures, class_metrics, labelled, view_of, zero_shot)
from contrastive.evaluation.embed import encode_images
from contrastive.evaluation.pieces import EvaluationPieces, Measurement
from contrastive.evaluation.retrieval import (
    encode_captions, gap_and_health, multi_instance_retrieval, retrieval_both_ways)

import numpy as np

TASKS = ("retrieval", "mir", "zero-shot", "knn", "probe", "gap", "qa")
BY_CAPTION = {"retrieval", "gap", "mir"}
BY_CLASS = {"knn", "probe", "zero-shot"}
WITH_TRAINING = {"knn", "probe"}  # they learn from training images
# sets with captions on which raw pixels have a better kNN than trained towers
WITHOUT_KNN = ("emoji",)


class Towers(NamedTuple):
    """What encodes a split."""

    model: object
    tokenizer: object  # None without a text encoder
    transform: EvalTransform


@dataclasses.dataclass
class ClassOptions:
    """What the tasks by class read beside the split that is evaluated."""

    train: Data | None = None  # from which kNN and probes learn
    few_shot: Data | None = None  # from which the few-shot probe learns; None = from some of train
    shot_limits: tuple | None = None  # of core.metrics.accuracy_by_class_size
    view: EvalTransform | None = None  # of these tasks, if it is not that of the towers


# ======================================================= tasks that are supported =================
def usual_tasks(model, tokenizer, data):
    """The tasks of a split if none are named, in training and in eval.py.

    unsupported_tasks says which of them the split does not support.
    """
    if hasattr(model, "answers"):
        return ("qa",)
    if tokenizer is None:
        return ("knn", "probe")
    if data.has_captions and data.name in WITHOUT_KNN:
        return ("retrieval", "gap", "mir")
    if data.has_captions:
        return ("retrieval", "gap", "mir", "knn")
    return ("retrieval", "gap", "mir", "knn", "zero-shot")  # TeMo, Fig. 7


def unsupported_tasks(tasks, data, towers, train=None):
    """The tasks that cannot be done on a split with a model: {task: the reason in words}.

    Class names serve as captions where there are no others. train: Data for knn and probe, or None.
    """
    model, tokenizer, _ = towers
    reasons = {}
    for task in tasks:
        if task == "qa":
            reason = reason_against_answers(data, model)
        elif task in BY_CAPTION:
            reason = reason_against_captions(task, data)
        else:
            reason = reason_against_classes(task, data, train)
        if not reason and task != "qa":
            reason = reason_of_model(task, model, tokenizer)
        if reason:
            reasons[task] = reason
    return reasons


def reason_against_answers(data, model):
    """Why a model cannot answer the questions of a split; "" if it can."""
    if not hasattr(model, "answers"):
        return "the model answers no questions"
    from contrastive.evaluation.answers import reason_without_questions

    return reason_without_questions(data, not model.answers)


def reason_against_captions(task, data):
    """Why a split does not support a task by caption; "" if it does."""
    if has_questions_as_captions(data):
        return "the captions of the set are its questions, which say nothing of the videos"
    has_classes = data.column("verb") is not None and data.column("noun") is not None
    if task == "mir" and data.sentences is None and not has_classes:
        return "the set has no relevancies (no verb and noun classes)"
    return ""


def has_questions_as_captions(data):
    """Whether a row of the data has its question in place of a caption."""
    questions = data.column("question")
    if questions is None:
        return False
    return any(data.captions(i) == [question] for i, question in enumerate(questions))


def reason_against_classes(task, data, train):
    """Why a split does not support a task by class; "" if it does."""
    if data.labels is None or not (data.labels >= 0).any():
        return "the set has no classes"
    if task in WITH_TRAINING:
        if train is None or not have_same_classes(train, data):
            return "there are no other training images of the same classes"
    elif not data.label_names:
        return "the classes have no names"
    return ""


def have_same_classes(train, data):
    """Whether the classes of both splits are the same: by their names, or splits of one set."""
    if train.label_names != data.label_names:
        return False
    return bool(data.label_names) or train.name == data.name


def reason_of_model(task, model, tokenizer):
    """Why a model does not support a task by caption or by class; "" if it does."""
    if hasattr(model, "answers"):
        return "the model answers questions: --tasks qa"
    if tokenizer is None and task not in WITH_TRAINING:
        return "the model has no text encoder"
    return ""


# ======================================================= one split ================================
def measure(towers, data, tasks, options=None, *, device, workers=0):
    """Evaluates a split. Collective.

    Args:
        towers: Towers.
        data: the split.
        tasks: of TASKS, all of which it supports; qa stands alone.
        options: ClassOptions of the tasks by class.
        workers: loader processes.
    Returns: Measurement.
    """
    if "qa" in tasks:
        from contrastive.evaluation import answers

        return Measurement(*answers.evaluate(towers, data, device, workers=workers))
    split = SplitEvaluation(towers, data, options or ClassOptions(), device, workers)
    if BY_CAPTION.intersection(tasks):
        split.encode_captions()
    if "retrieval" in tasks:
        split.count_repeated_captions()
        split.add(*retrieval_both_ways(split.pieces))
    if "gap" in tasks:
        split.add(*gap_and_health(split.pieces))
    if "mir" in tasks:
        metrics, chance = multi_instance_retrieval(
            split.pieces, towers.model, towers.tokenizer, device)
        split.add({"mir": metrics}, {"mir": chance})
    if BY_CLASS.intersection(tasks):
        split.encode_classes()
    if "zero-shot" in tasks:
        metrics, chance, num_cut = zero_shot(
            towers.model, towers.tokenizer, split.labelled_image, split.labels, data,
            device=device)
        split.add({"zero-shot": metrics}, {"zero-shot": chance})
        if num_cut:
            split.counts["prompts_cut"] = num_cut
    if WITH_TRAINING.intersection(tasks):
        split.learn_classes(tasks)
    return Measurement(split.counts | split.metrics, split.chance, split.pieces)


class SplitEvaluation:
    """One split under evaluation, and the numbers and pieces of the tasks done so far."""

    def __init__(self, towers, data, options, device, workers):
        self.towers, self.data, self.options = towers, data, options
        self.device, self.workers = device, workers
        self.metrics, self.chance, self.counts = {}, {}, {}
        self.encoded = encode_images(
            towers.model, data, towers.transform, device, workers=workers)
        if frames_of(data):
            self.counts["clips"] = len(self.encoded.index)
        self.counts["images"] = len(self.encoded.index)
        self.counts["unreadable"] = len(self.encoded.unreadable)
        if self.encoded.num_identical:
            kind = "clips" if frames_of(data) else "images"
            self.counts[f"identical_{kind}"] = self.encoded.num_identical
        self.pieces = EvaluationPieces(data, self.encoded.index, self.encoded.image)

    def add(self, metrics, chance):
        """Adds the numbers of a task."""
        self.metrics.update(metrics)
        self.chance.update(chance)

    # ---- by caption ----
    def encode_captions(self):
        """Encodes the captions of the images."""
        encode_captions(self.pieces, self.towers.model, self.towers.tokenizer, self.device)
        self.counts["captions"] = len(self.pieces.text)
        if self.pieces.num_cut:
            self.counts["captions_cut"] = self.pieces.num_cut

    def count_repeated_captions(self):
        """Counts captions that several groups of images have, as right or as wrong ones."""
        if self.pieces.num_repeated:
            name = f"repeated_captions_{self.data.same_text}"
            self.counts[name] = self.pieces.num_repeated

    # ---- by class ----
    def encode_classes(self):
        """Takes the images that have a class, encoded again if the tasks by class see another view
        of them."""
        encoded = self.encoded
        if self.options.view:
            encoded = encode_images(self.towers.model, self.data, self.options.view, self.device,
                                    workers=self.workers)
        rows = np.flatnonzero(self.data.labels[encoded.index] >= 0)
        self.labelled_image = encoded.image[rows]                          # (L, D)
        self.labelled_features = encoded.features[rows]                    # (L, width)
        self.labels = self.data.labels[encoded.index[rows]]                # (L,)
        if len(rows) < len(encoded.index):
            self.counts["without_class"] = len(encoded.index) - len(rows)

    def learn_classes(self, tasks):
        """Nearest neighbours and linear probes."""
        options, model = self.options, self.towers.model
        feature_options = FeatureOptions(
            transform=options.view or self.towers.transform, device=self.device,
            workers=self.workers)
        train = labelled(model, options.train, feature_options)
        test = LabelledFeatures(self.labelled_image, self.labelled_features, self.labels)
        few_shot, few_shot_features = None, None
        if "probe" in tasks and options.few_shot is not None:
            few_shot = options.few_shot
            few_shot_features = labelled(model, few_shot, feature_options)
        metrics, chance, per_class = class_metrics(
            tasks, train, test, few_shot_features, options.shot_limits, device=self.device)
        self.add(metrics, chance)
        self.pieces.per_class = per_class
        if "probe" in tasks:
            _, self.pieces.train_features, self.pieces.train_labels = train
            self.pieces.features, self.pieces.labels = self.labelled_features, self.labels
            self.pieces.label_names = self.data.label_names


# ======================================================= all sets of a run ========================
class Evaluator:
    """The evaluation of all sets of a run, after training and during it, and that of eval.py.

    evaluator("val") returns metrics, chance levels and EvaluationPieces, three dicts by data set.
    Collective: all processes call it.

    Args:
        model, tokenizer, transform: the towers; tokenizer None without texts.
        sets: {name: {"val": Data, "test": Data}}, with the splits that exist.
        train: for knn and probe of sets with the same classes; None = neither is measured.
        device: of the model.
        args: flags of the run.
        method_metrics: function of the pieces of a split with captions -> metrics of a method; None
            = no such.
        few_shot: Data from which the few-shot probe learns; None = from some of train.
        tasks: of TASKS; empty = the usual_tasks. What a split does not support is left out.
    Attributes:
        left_out: {(name, split): {task: the reason}}.
    Raises: UserError if a split supports none of the tasks.
    """

    def __init__(self, model, tokenizer, transform, sets, train, *, device, args,
                 method_metrics=None, few_shot=None, tasks=()):
        if train is not None:
            # neighbours are clips, not their captions, and those of the set itself
            train = (train.before_extra_pairs or train).folded()
        self.towers = Towers(model, tokenizer, transform)
        self.sets, self.train, self.few_shot = sets, train, few_shot
        self.device, self.args, self.method_metrics = device, args, method_metrics
        self.shot_limits = getattr(args, "shot_limits", None)
        self.tasks, self.left_out = {}, {}
        for name, splits in sets.items():
            for split, data in splits.items():
                self.choose_tasks(name, split, data, tasks)

    def choose_tasks(self, name, split, data, tasks):
        """Decides on the tasks of a split. tasks: those that are asked for; empty = the usual."""
        chosen = tasks or usual_tasks(self.towers.model, self.towers.tokenizer, data)
        unsupported = unsupported_tasks(chosen, data, self.towers, self.train)
        self.tasks[name, split] = [task for task in chosen if task not in unsupported]
        self.left_out[name, split] = unsupported
        if not self.tasks[name, split]:
            reasons = "; ".join(f"{task}: {reason}" for task, reason in unsupported.items())
            raise UserError(f"{name}: nothing can be measured on its {split} split: {reasons}")

    def __call__(self, split):
        metrics, chance, pieces = {}, {}, {}
        for name, splits in self.sets.items():
            if split in splits:
                measured = self.measure_split(name, split)
            elif self.towers.tokenizer is None:
                # temperature_schedules.py measures and draws the training images
                measured = Measurement({}, {}, self.training_pieces())
            else:
                continue
            metrics[name], chance[name], pieces[name] = measured
        return metrics, chance, pieces

    def measure_split(self, name, split):
        """The Measurement of a split."""
        view = view_of(self.towers.transform, name, self.args.dataset)
        options = ClassOptions(self.train, self.few_shot, self.shot_limits, view)
        tasks = self.tasks[name, split]
        measured = measure(self.towers, self.sets[name][split], tasks, options,
                           device=self.device, workers=self.args.workers)
        if self.method_metrics and "retrieval" in tasks:
            measured.metrics.update(self.method_metrics(measured.pieces))
        return measured

    def training_pieces(self):
        """EvaluationPieces of the training images alone."""
        model, _, transform = self.towers
        options = FeatureOptions(transform, self.device, self.args.workers)
        train = labelled(model, self.train, options)
        return EvaluationPieces(train_features=train.probe_features, train_labels=train.labels)
