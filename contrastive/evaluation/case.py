"""A data set that eval.py evaluates: what its tasks share, their numbers, and the lines that print them."""

import argparse
import dataclasses
import functools
import itertools
from pathlib import Path

from contrastive.data import load_data, splits_of
from contrastive.data.images import CIFAR_STATS
from contrastive.data.long_tail import labelled_splits
from contrastive.data.table import has_clips
from contrastive.encoders.base import CLIP_VIP, STATS
from contrastive.encoders.models import build_model, load_model
from contrastive.encoders.tokenizers import build_tokenizer
from contrastive.encoders.two_tower import EvalTransform
from contrastive.engine.processes import UserError, flatten, hub_reason, opening, read_json, say, slug
from contrastive.evaluation.answers import refuse_untrained
from contrastive.evaluation.by_class import TASKS, padded_and_flipped
from contrastive.evaluation.embed import encode_images, encode_texts, few_queries, say_unreadable
from contrastive.evaluation.metrics import NotFinite
from contrastive.evaluation.retrieval import retrieval_pieces

import numpy as np
import torch

ALTER_TRAINING = "unfold_captions", "caption_noise", "extra_captions", "extra_pairs"  # flags: only a run's training set


class Subject:
    """The model under evaluation: model, tokenizer (None without texts), transform, device. own: the flags of its run,
    {} for a model by name. folder: where the result goes. Collective."""

    def __init__(self, args, device):
        self.args, self.device, run = args, device, Path(args.checkpoint)
        model, self.tokenizer, self.transform, self.own = open_model(args)
        self.model = model.to(self.device)
        self.knn_features = args.knn_features or self.own.get("knn_features") or "projected"
        usual = ["qa"] if hasattr(model, "answers") else ["retrieval", "knn", "gap"]
        args.tasks = args.tasks or usual
        self.meta_data = read_json(run / "meta_data.json", {}) if self.own else {}  # mama.py learnt weights from these
        by_name = Path("runs/eval") / slug(args.checkpoint or args.image_encoder)
        beside = run / "eval" if (run / "model.json").is_file() else by_name
        self.folder = Path(args.output_dir or beside)
        with opening(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)

    def images(self, data, view=("own", "own"), rows=None):
        """As embed.encode_images: index (M,), image (M, D), features (M, width), {key: reason}. Collective."""
        batch, workers = self.args.eval_batch, self.args.workers
        return encode_images(self.model, data, self.transform_of(*view), self.device, batch, workers, rows)

    def view(self, task, name):
        """(resize, name of the pixel statistics) with which a task sees the images of a set; 'own' = as in training."""
        resize, stats, cifar = self.args.eval_resize, self.args.image_stats, "cifar10"
        trainer = self.transform.resize == "squash" and task in TASKS and name != self.own.get("dataset")
        if name.startswith("cifar100"):
            cifar = "cifar100"
        if stats == "auto" and trainer:
            stats = "cifar" if name.startswith("cifar") else "imagenet"
        if resize == "auto":
            resize = "crop" if trainer else "own"
        return resize, {"auto": "own", "cifar": cifar}.get(stats, stats)

    def transform_of(self, resize, stats):
        """The view of the images under these names (see `view`)."""
        own = self.transform
        mean, std = (own.mean, own.std) if stats == "own" else (STATS | CIFAR_STATS)[stats]
        return EvalTransform(own.size, mean, std, own.resize if resize == "own" else resize,
                                    own.size / own.short, own.bicubic)

    def texts(self, texts, clean=True):
        """Embeddings (len(texts), D); clean: as captions of the run are, if it cleans them. Collective."""
        return encode_texts(self.model, self.tokenizer if clean else self.tokenizer.plain(), texts, self.device)


class Case:
    """A data set under evaluation: what its tasks share, and their numbers. Collective.

    Attributes: data; metrics, chance: {task: numbers}."""

    def __init__(self, subject, name, options):
        self.subject, self.args, self.name, self.options = subject, subject.args, name, options
        self.sets = None
        self.metrics, self.chance, self.encoded, self.known = {}, {}, {}, {}
        args, own = subject.args, subject.own
        if "imbalance_ratio" in own and name == own["dataset"]:
            # temperature_schedules.py or a fork: use the run's own long tail, held-out images and classes
            self.sets = labelled_splits(argparse.Namespace(**own | options))
        data = self.open(args.split)
        if data.streamed:
            raise UserError(f"--split {args.split}: {name} is a stream in that split; use --split val or test")
        altered = [f"--{flag.replace('_', '-')}" for flag in ALTER_TRAINING if own.get(flag)]
        if altered and self.key_of(args.split) == "train":
            say(f"{name} (train): without the run's {', '.join(altered)}")
        if args.limit:
            data = data.select(np.arange(min(args.limit, len(data))), args.split)
        if data.note:
            say(f"\n{name} ({args.split}): {data.note}")
        self.data = data = dataclasses.replace(data, max_captions=args.max_captions or data.max_captions)
        self.images(next((t for t in args.tasks if t in TASKS or data.has_captions), args.tasks[0]))

    def open(self, split):
        """The split as the run used it: without its meta-data.

        Raises: UserError for a val split whose images the run trained on."""
        own, held_out = self.subject.own, self.args.hold_out_val and "val" not in splits_of(self.name)
        if split == "val" and held_out and self.name == own.get("dataset") and not own.get("hold_out_val"):
            raise UserError(f"--hold-out-val: the run trained on all of {self.name}, also on what would be held out")
        data = self.sets[split] if self.sets else load_data(self.name, split, **self.options)
        learnt = set(self.subject.meta_data.get(self.key_of(split), ()))
        return data.select([i for i, key in enumerate(data.keys()) if key not in learnt]) if learnt else data

    def key_of(self, split):
        """The name of a split in the run's meta_data.json."""
        return "train" if split == "train" and self.name == self.subject.own.get("dataset") else f"{self.name} {split}"

    def images(self, task):
        """index (M,) of the readable rows, image (M, D), features (M, width), with the view that this task uses."""
        view = self.subject.view(task, self.name)
        if view not in self.encoded:
            *found, bad = self.subject.images(self.data, view)
            if not self.encoded:
                say_unreadable(self.data, bad)
                self.metrics |= {"images": len(found[0]), "unreadable": len(bad)}
                self.metrics |= {"clips": len(found[0])} if has_clips(self.data) else {}
            self.encoded[view] = found
        if view != ("own", "own"):
            self.metrics.setdefault("views", {})[task] = dict(zip(("resize", "stats"), view))
        return self.encoded[view]

    def labelled(self, task):
        """image (M, D), features (M, width), labels (M,) of the images that have a class."""
        index, image, features = self.images(task)
        labels = torch.from_numpy(self.data.labels[index])                 # (M,)
        known = labels >= 0
        if not known.all():
            self.metrics["without_class"] = int((~known).sum())
        return image[known], features[known], labels[known]

    @functools.cached_property
    def pieces(self):
        """retrieval_pieces of the set: images and all their captions."""
        subject, (index, image, _) = self.subject, self.images("retrieval")
        pieces = retrieval_pieces(subject.model, subject.tokenizer, self.data, index, image, subject.device)
        self.metrics["captions"] = len(pieces["text"])
        return pieces

    def check(self, task):
        """Raises: UserError with the reason if this task cannot run on the set; NotFinite if the embeddings are not
        finite."""
        if task in ("retrieval", "gap", "histograms", "mir") and not self.data.has_captions:
            raise UserError("the set has no captions")
        if task in TASKS and self.data.labels is None:
            raise UserError("the set has no labels")
        if task in TASKS and not len(self.labelled(task)[2]):
            raise UserError("none of its images has a class")
        if task in ("knn", "probe") and self.args.split == "train":
            raise UserError("--split train: each image would find itself among the training images")
        if task == "qa" and not hasattr(self.subject.model, "answers"):
            raise UserError("the model answers no questions")
        graph = getattr(self.subject.model, "model", "") == "vgt"
        if task not in ("knn", "probe", "qa") or graph and task != "qa":
            refuse_untrained(self.subject.model)
        if task not in ("knn", "probe") and not self.subject.tokenizer:
            raise UserError("the model has no text encoder")
        if task in ("gap", "histograms") and not all(self.pieces[k].isfinite().all() for k in ("image", "text")):
            raise NotFinite("embeddings hold non-finite values")

    def train(self, task):
        """Features (K, width) and labels (K,) of the training images that have a class, encoded once per view, as the
        run's own evaluation does (--train-features). Raises: UserError without a training set."""
        view = self.subject.view(task, self.name)
        if view not in self.known:
            train = self.open("train")
            if train.streamed:
                raise UserError("the training set is a stream: no kNN or probe")
            if train.label_names != self.data.label_names:
                raise UserError("train and test name different classes")
            if self.sets and self.subject.own.get("train_features") == "augmented":
                train = padded_and_flipped(train, self.subject.own["seed"])
            self.known[view] = self._features(train, view)
        (image, features), labels = self.known[view]
        projected = task == "knn" and self.subject.knn_features == "projected"
        return image if projected else features, labels                    # (K, D) or (K, width), (K,)

    def few_shot(self, task):
        """The same for the images from which the run's few-shot probe learns (--few-shot-file), or None."""
        listed = self.sets and "few-shot" in self.sets and not self.args.few_shot
        if listed:
            (_, features), labels = self._features(self.sets["few-shot"], self.subject.view(task, self.name))
        return (features, labels) if listed else None

    def _features(self, data, view):
        """((K, D) embeddings, (K, width) features), (K,) labels of the images that have a class."""
        rows, image, features, _ = self.subject.images(data, view)
        labels = torch.from_numpy(data.labels[rows])                       # (K,)
        known = labels >= 0
        return (image[known], features[known]), labels[known]

    def picture(self, kind):
        """Path of a picture of this set."""
        return self.subject.folder / f"{kind}_{slug(self.name)}.{self.args.figures}"


def keep_earlier(file, command):
    """Gives the result of another command a number: eval.json becomes eval_1.json, ..."""
    try:
        other = file.exists() and read_json(file).get("command") != command
    except UserError:                                                      # damaged
        other = True
    if other:
        free = next(path for k in itertools.count(1) if not (path := file.with_name(f"eval_{k}.json")).exists())
        file.rename(free)
        say(f"the earlier {file.name} is now {free.name}; pictures of the same name are replaced")


def table(name, metrics, chance, tasks):
    """The result of one data set as lines, every number with its chance level if it has one."""
    by_chance = flatten(chance)
    captions = f", {metrics['captions']} captions" if "captions" in metrics else ""
    unknown = f", {metrics['without_class']} without a class" if "without_class" in metrics else ""
    clips = "clips" in metrics
    number = f"{metrics['clips']} clips" if clips else f"{metrics['images']} images"
    lines = [f"\n{name}: {number}{captions}{unknown}"]
    for task in tasks:
        groups = {}
        for key, value in flatten(metrics.get(task, {})).items() if task != "histograms" else ():
            group, _, last = key.rpartition("/")
            groups.setdefault(group, []).append(_cell(last, value, by_chance.get(f"{task}/{key}")))
        view = metrics.get("views", {}).get(task)
        if groups and view:
            lines.append(f"  {task}: images seen as {view['resize']}, statistics {view['stats']}")
        for group, cells in groups.items():
            label = f"{task} {group.replace('_', ' ')}".strip()
            label = label.replace("image", "video") if clips else label
            lines.append(f"  {label:<26} {'  '.join(cells)}")
    few = few_queries(**{"texts": metrics.get("captions", 0), "videos" if clips else "images": metrics["images"]})
    return "\n".join(lines + ([f"  {few}"] if few else []))


def _cell(name, value, chance):
    number = f"{value:.2f}" if isinstance(value, float) else f"{value}"
    return f"{name} {number}" + ("" if chance is None else f" ({chance:.2f})")


def open_model(args):
    """(model, tokenizer, transform, flags of its run): of a run folder, a CLIP by name, or a pair of encoders."""
    folder = Path(args.checkpoint) if args.checkpoint else None
    if folder and (folder / "model.json").is_file():
        own = read_json(folder / "args.json", {})
        if not own:
            say(f"WARNING: {folder}: no args.json in it, so it is not known how the run read its data")
        return *load_model(folder), own
    if folder and folder.is_dir() and (folder / "checkpoints").is_dir():
        raise UserError(f"--checkpoint {folder}: this run has not ended (no model.json); continue it with --resume "
                        f"{folder}")
    image, text = (args.checkpoint, args.checkpoint) if args.checkpoint else (args.image_encoder, args.text_encoder)
    if "small" in (image, text):
        raise UserError("--image-encoder and --text-encoder small have weights only in a run; give --checkpoint "
                        "RUN_DIR")
    width, tokenizer = _clip_width(image), build_tokenizer(text, 77)
    spec = dict(image_encoder=image, text_encoder=text, embed_dim=width or 256, image_size=args.image_size or 224,
                text_length=77, text_pooling=args.text_pooling, image_stats="encoder", eval_resize="crop",
                frames=args.frames or 12)
    torch.manual_seed(args.seed)
    model, transform = build_model(spec, tokenizer, args.pretrained, args.init_from)
    transform.bicubic = bool(width)                                        # a CLIP, as its own processor
    projections = {"vision.projection.weight", "text.projection.weight"}
    if not projections <= model.from_file and (not width or _clip_width(text) != width):
        args.knn_features = args.knn_features or "backbone"
        say("the projections of this pair are random: only its image features (knn, probe) are meaningful")
    return model.eval(), tokenizer, transform, {}


def _clip_width(name):
    """projection_dim of a CLIP by name (or clip_vip:NAME), else 0."""
    name = name.removeprefix(CLIP_VIP)
    if "/" not in name and not Path(name).is_dir():
        return 0
    import transformers
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        return config.projection_dim if config.model_type == "clip" else 0  # of one tower alone, hub_encoder has none
    except (OSError, ValueError) as error:
        reason = hub_reason(error)
        raise UserError(f"--checkpoint {name}: neither a run folder nor a model ({reason})") from error
