"""What eval.py evaluates: a model by name or of a run, its views of images, its data, NCL's stand-ins for queries."""

import argparse
from pathlib import Path

from contrastive.data import data_options, load_data
from contrastive.data.long_tail import labelled_splits
from contrastive.data.table import EmptySplit
from contrastive.encoders.base import CLIP_VIP
from contrastive.encoders.models import build_model, load_model, untrained
from contrastive.encoders.texts import Tokenizer, build_tokenizer
from contrastive.engine.processes import UserError, opening, read_json, say, slug
from contrastive.evaluation.by_class import padded_and_flipped
from contrastive.evaluation.clusters import Clusters
from contrastive.evaluation.embed import encode_images, encode_texts

import numpy as np
import torch
from safetensors.torch import load_file

ALTER_TRAINING = "unfold_captions", "caption_noise", "extra_captions", "extra_pairs"  # flags: only a run's training set
QUEUE = 16_384  # stand-ins that are drawn from a train split
SCRIPTS = "temperature_schedules", "mmts", "ncl", "mama", "temo"
SAID = ("normalize", "queue_size", "text_length", "frames", "knn_features", "image_column", "caption_column",
        "label_column", "same_text")  # flags that are compared with the run's own


class Subject:
    """The model under evaluation: towers (model, tokenizer or None without texts, transform), device. own: the flags of
    its run, {} for a model by name. folder: where the result goes. Collective."""

    def __init__(self, args, device):
        self.args, self.device, run = args, device, Path(args.checkpoint)
        model, tokenizer, transform, self.own = open_model(args)
        self.towers = model.to(device), tokenizer, transform
        self.knn_features = args.knn_features or self.own.get("knn_features") or "projected"
        queues = run / "queues.safetensors"                                # of an NCL run: texts, videos (K, D), gamma
        with opening(queues):                                              # its own queries are those of train
            self.queues = load_file(queues) if queues.is_file() and args.split != "train" else {}
        self.clusters = Clusters(run, device) if (run / "clusters.json").is_file() else None     # of an MM-TS run
        self.gamma = args.gamma
        if args.normalize == "dsl":  # CLIP-ViP's; a run's own, such as MAMA's 1, may do nothing
            self.gamma = args.gamma or 0.01
        elif (args.normalize != "none" or self.queues) and not args.gamma:
            self.gamma = self.queues["gamma"].item() if self.queues else _gamma(self.own, run)
        self.meta_data = read_json(run / "meta_data.json", {})             # mama.py learnt weights from these
        for name in SAID:
            value, trained = getattr(args, name), self.own.get(name)
            if trained is not None and value not in ("", 0, trained):
                say(f"--{name.replace('_', '-')} {value}: {trained} in training")
        self.folder = Path(args.output_dir or (run / "eval" if self.own else Path("runs/eval") / slug(args.checkpoint)))
        with opening(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)

    def untrained(self):
        """The run's tower at random weights; None of a model by name."""
        spec = read_json(Path(self.args.checkpoint) / "model.json") if self.own else None
        return untrained(spec, self.own["seed"]) if spec else None

    def open(self, name, folder):
        """A function split -> Data as the run read it: with its long tail, without its meta-data and what else only its
        training had (ALTER_TRAINING); None for few-shot images that the run does not have."""
        own, args, mine = self.own, self.args, name == self.own.get("dataset")
        names = {"class_names": args.class_names} if args.class_names else {}
        options = data_options(argparse.Namespace(**own | names), name, folder)
        options |= data_options(argparse.Namespace(**vars(args) | {"dataset": ""}))
        options |= {"image_size": self.towers[2].size} | dict.fromkeys(ALTER_TRAINING, 0)
        tail = mine and "imbalance_ratio" in own                           # temperature_schedules.py or a fork
        sets = labelled_splits(argparse.Namespace(**own | options)) if tail else {}
        if sets and own.get("train_features") == "augmented" and args.split != "train":
            sets["train"] = padded_and_flipped(sets["train"], own["seed"])

        def split_of(split):
            if split == "few-shot":
                return sets.get(split)
            if sets and split not in sets:
                raise EmptySplit(f"{name} has no {split} split, as in the run")
            data = sets[split] if sets else load_data(name, split, **options)
            learnt = set(self.meta_data.get(f"{name} {split}", ()))
            return data.select([i for i, key in enumerate(data.keys()) if key not in learnt]) if learnt else data
        return split_of

    def stand_ins(self, name, split_of):
        """(texts (K, D), videos (K, D)) for --normalize: the queues of an NCL run, else embeddings of randomly drawn
        training examples and of their captions; ((), ()) if the test queries alone are used (dsl, and oracle without
        a queue)."""
        args, queues, how = self.args, self.queues, f"{name}: --normalize {self.args.normalize}: by"
        if self.own.get("script", "ncl") not in SCRIPTS:
            say(f"WARNING: --normalize: by ncl.py's functions; those of {self.own['script']}.py may differ")
        of_run = queues and name == self.own.get("dataset")
        if args.as_trained and not of_run:                                 # as its training evaluates other sets
            return (), ()
        if args.normalize == "dsl" or args.normalize == "oracle" and not of_run:
            say(f"{how} all test queries, so no fair result; gamma {self.gamma:.3g}")
            return (), ()
        if of_run:
            texts, videos = (queues[kind][-args.queue_size:] for kind in ("texts", "videos"))   # 0: all
        else:
            def some(n):
                return np.random.default_rng(42).permutation(n)[:args.queue_size or QUEUE]
            train, (model, tokenizer, transform) = split_of("train"), self.towers
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


def resolved(name):
    """Own data by their path, however it is written; another name as it stands."""
    path = Path(name).expanduser()
    return path.resolve() if name and path.exists() else name


def _gamma(own, run):
    """The temperature of a run: the learnt one, or its --tau. Raises: UserError if it has no single one."""
    of_pairs = own.get("shifts") or own.get("loss") in ("ts", "dystress", "dystress-shifted", "max-margin")
    of_pairs = of_pairs or own.get("loss") == "temo" and not own.get("base") and own.get("unimodal") != "plain"
    if of_pairs or own.get("schedule") is True:                            # mmts.py's
        raise UserError("--normalize: the run has no single temperature (none, or its own change over time or pairs); "
                        "give --gamma, such as the middle of them")
    if own.get("learnable_tau"):
        with opening(run / "own.safetensors"):
            return load_file(run / "own.safetensors")["tau.log_tau"].exp().item()
    return own.get("tau") or 0.01


def open_model(args):
    """(model, tokenizer, transform, flags of its run): of a run folder, or of a CLIP by name, at its own size."""
    run = Path(args.checkpoint)
    if (run / "args.json").is_file():
        model, tokenizer, transform = load_model(run)
        if args.text_length and tokenizer:
            tokenizer = Tokenizer(tokenizer.tokenizer, args.text_length, tokenizer.clean)
        return model, tokenizer, transform, read_json(run / "args.json")
    from transformers import AutoConfig
    name = args.checkpoint.removeprefix(CLIP_VIP)
    with opening(f"--checkpoint {name} (no args.json of a run there, so a CLIP by name)"):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if config.model_type != "clip":
        raise UserError(f"--checkpoint {name}: neither the folder of a run nor a CLIP, but {config.model_type}")
    tokenizer = build_tokenizer(name, args.text_length or 77)
    spec = dict(image_encoder=args.checkpoint, text_encoder=name, embed_dim=config.projection_dim,
                image_size=config.vision_config.image_size, text_length=77, text_pooling="cls", image_stats="encoder",
                eval_resize="crop")
    torch.manual_seed(42)
    model, transform = build_model(spec, tokenizer, True, args.init_from)
    transform.bicubic = True                                               # as its own processor
    return model.eval(), tokenizer, transform, {}
