"""What eval.py evaluates: a model by name or of a run, its views of images, its data, NCL's stand-ins for queries."""

import argparse
from pathlib import Path

from contrastive.data import data_options, load_data, splits_of
from contrastive.data.images import CIFAR_STATS
from contrastive.data.long_tail import labelled_splits
from contrastive.encoders.base import CLIP_VIP, STATS
from contrastive.encoders.models import EvalTransform, build_model, load_model, untrained
from contrastive.encoders.texts import build_tokenizer
from contrastive.engine.processes import UserError, opening, read_json, say, slug
from contrastive.evaluation.by_class import padded_and_flipped
from contrastive.evaluation.embed import encode_images, encode_texts

import numpy as np
import torch
from safetensors.torch import load_file

ALTER_TRAINING = "unfold_captions", "caption_noise", "extra_captions", "extra_pairs"  # flags: only a run's training set
SCRIPTS = "temperature_schedules", "mmts", "ncl", "mama", "temo"


class Subject:
    """The model under evaluation: towers (model, tokenizer or None without texts, transform), device. own: the flags of
    its run, {} for a model by name. folder: where the result goes. Collective."""

    def __init__(self, args, device):
        self.args, self.device, run = args, device, Path(args.checkpoint)
        model, tokenizer, transform, self.own = open_model(args)
        self.towers = model.to(device), tokenizer, transform
        self.knn_features = args.knn_features or self.own.get("knn_features") or "projected"
        queues = run / "queues.safetensors"                                # of an NCL run: texts, videos (K, D), gamma
        with opening(queues):
            self.queues = load_file(queues) if self.own and queues.is_file() else {}
        self.gamma = args.gamma
        if args.normalize != "none" and not args.gamma:
            self.gamma = self.queues["gamma"].item() if self.queues else _gamma(self.own, run)
        self.meta_data = read_json(run / "meta_data.json", {}) if self.own else {}  # mama.py learnt weights from these
        by_name = Path("runs/eval") / slug(args.checkpoint or args.image_encoder)
        self.folder = Path(args.output_dir or (run / "eval" if self.own else by_name))
        with opening(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)

    def untrained(self):
        """{untrained: the run's tower at random weights}; {} of a model by name."""
        spec = read_json(Path(self.args.checkpoint) / "model.json") if self.own else None
        return {"untrained": untrained(spec, self.own["seed"])} if spec else {}

    def views(self, name):
        """(transform of a set's images, that of the tasks by class or None if it is the same, words on both). A run
        that squashes (the CC3M trainer's recipe) sees the classes of other sets as that trainer does: cropped, with
        ImageNet's or CIFAR's statistics."""
        args, own, cifar = self.args, self.towers[2], "cifar100" if name.startswith("cifar100") else "cifar10"
        known = STATS | {"own": (own.mean, own.std), "cifar": CIFAR_STATS[cifar]}
        asked = {k: v for k, v in (("resize", args.eval_resize), ("stats", args.image_stats)) if v != "auto"}
        usual = {"resize": "own", "stats": "own"} | asked
        by_class = usual
        if own.resize == "squash" and name != self.own.get("dataset"):
            by_class = {"resize": "crop", "stats": "cifar" if name.startswith("cifar") else "imagenet"} | asked

        def view(resize, stats):
            resize = own.resize if resize == "own" else resize
            return EvalTransform(own.size, *known[stats], resize, own.size / own.short, own.bicubic)
        of_whom = "" if by_class == usual else "of the tasks by class "
        words = f"images {of_whom}seen as {by_class['resize']}, statistics {by_class['stats']}"
        words = "" if {*by_class.values()} == {"own"} else words
        return view(**usual), view(**by_class) if of_whom else None, words

    def open(self, name, folder):
        """A function split -> Data as the run read it: with its long tail, without its meta-data and what else only its
        training had (ALTER_TRAINING); None for few-shot images that the run does not have.

        Raises: UserError for a val split whose images the run trained on."""
        own, args, mine = self.own, self.args, name == self.own.get("dataset")
        options = data_options(argparse.Namespace(**own), name, folder)
        options |= data_options(argparse.Namespace(**vars(args) | {"dataset": ""}))
        options |= {"image_size": self.towers[2].size} | dict.fromkeys(ALTER_TRAINING, 0)
        held_out = args.hold_out_val and "val" not in splits_of(name)
        if args.split == "val" and held_out and mine and not own.get("hold_out_val"):
            raise UserError(f"--hold-out-val: the run trained on all of {name}, also on what would be held out")
        tail = mine and "imbalance_ratio" in own                           # temperature_schedules.py or a fork
        sets = labelled_splits(argparse.Namespace(**own | options)) if tail else {}
        if sets and own.get("train_features") == "augmented" and args.split != "train":
            sets["train"] = padded_and_flipped(sets["train"], own["seed"])

        def split_of(split):
            if split == "few-shot":
                return sets.get(split)
            data = sets[split] if sets else load_data(name, split, **options)
            learnt = set(self.meta_data.get("train" if split == "train" and mine else f"{name} {split}", ()))
            return data.select([i for i, key in enumerate(data.keys()) if key not in learnt]) if learnt else data
        return split_of

    def stand_ins(self, name, split_of, transform):
        """(texts (K, D), videos (K, D)) for --normalize: the queues of an NCL run, else embeddings of randomly drawn
        training examples and of their captions; (None, None) if the test queries alone are used (dsl, and oracle
        without a queue)."""
        args, queues, how = self.args, self.queues, f"{name}: --normalize {self.args.normalize}: by"
        if self.own.get("script", "ncl") not in SCRIPTS:
            say(f"WARNING: --normalize: by ncl.py's functions; those of {self.own['script']}.py may differ")
        of_run = queues and name == self.own.get("dataset")
        if args.normalize == "dsl" or args.normalize == "oracle" and not of_run:
            say(f"{how} all test queries, so no fair result; gamma {self.gamma:.3g}")
            return None, None
        if of_run:
            texts, videos = queues["texts"][-args.queue_size:], queues["videos"][-args.queue_size:]
        else:
            def some(n):
                return np.random.default_rng(42).permutation(n)[:args.queue_size]
            train, (model, tokenizer, _) = split_of("train"), self.towers
            if train.streamed:
                raise UserError(f"{how} the checkpoint's queue, which it lacks: its training set is a stream")
            rows = np.sort(some(len(train)))                               # encode_images returns them in this order
            index, videos, *_ = encode_images(model, train, transform, self.device, workers=args.workers, rows=rows)
            captions = [c for i in index for c in train.captions(i)]
            texts = encode_texts(model, tokenizer, [captions[k] for k in some(len(captions))], self.device)
            videos = videos[some(len(videos))]                             # Fig. 5 takes the last ones
        where = "the run's queue" if of_run else "its train split"
        say(f"{how} {len(texts):,} texts and {len(videos):,} items of {where}; gamma {self.gamma:.3g}")
        return texts, videos

    def picture(self, kind, name):
        """Path of a picture of a set."""
        return self.folder / f"{kind}_{slug(name)}.png"


def _gamma(own, run):
    """The temperature of a run: the learnt one, or its --tau. Raises: UserError if it has no single one."""
    of_pairs = own.get("shifts") or own.get("loss") in ("ts", "dystress", "dystress-shifted", "max-margin")
    if of_pairs or own.get("schedule") is True:                            # mmts.py's
        raise UserError("--normalize: the run has no single temperature (none, or its own change over time or pairs); "
                        "give --gamma, such as the middle of them")
    if own.get("learnable_tau"):
        with opening(run / "own.safetensors"):
            return load_file(run / "own.safetensors")["tau.log_tau"].exp().item()
    return own.get("tau") or 0.01


def open_model(args):
    """(model, tokenizer, transform, flags of its run): of a run folder, a CLIP by name, or a pair of encoders."""
    if args.checkpoint and (Path(args.checkpoint) / "args.json").is_file():
        return *load_model(args.checkpoint), read_json(Path(args.checkpoint) / "args.json")
    image, text = (args.checkpoint, args.checkpoint) if args.checkpoint else (args.image_encoder, args.text_encoder)
    width, tokenizer = _clip_width(image), build_tokenizer(text, 77)
    spec = dict(image_encoder=image, text_encoder=text, embed_dim=width or 256, image_size=args.image_size or 224,
                text_length=77, text_pooling=args.text_pooling, image_stats="encoder", eval_resize="crop",
                frames=args.frames or 12)
    torch.manual_seed(42)
    model, transform = build_model(spec, tokenizer, True, args.init_from)
    transform.bicubic = bool(width)                                        # a CLIP, as its own processor
    projections = {"vision.projection.weight", "text.projection.weight"}
    if not projections <= model.from_file and (not width or _clip_width(text) != width):
        args.knn_features, tokenizer = args.knn_features or "backbone", None
        say("the projections of this pair are random: only its image features (knn, probe) are meaningful")
    return model.eval(), tokenizer, transform, {}


def _clip_width(name):
    """projection_dim of a CLIP by name (or clip_vip:NAME), else 0."""
    name = name.removeprefix(CLIP_VIP)
    if "/" not in name and not Path(name).is_dir():
        return 0
    import transformers
    with opening(name):
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    return config.projection_dim if config.model_type == "clip" else 0     # of one tower alone, hub_encoder has none
