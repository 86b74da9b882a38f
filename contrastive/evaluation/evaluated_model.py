"""What eval.py evaluates: the model of a run or one by name, its data, and training queries for
NCL's normalisation."""

import argparse
import functools
from pathlib import Path

from contrastive.core.files import read_json, slug
from contrastive.core.processes import UserError, opening, print_main
from contrastive.core.words import flag_of
from contrastive.data import data_options, load_data, open_pairs
from contrastive.data.long_tail import labelled_sets
from contrastive.data.registry import find_data_set, partition_name
from contrastive.data.splits import without_trained
from contrastive.data.table import EmptySplit, identity_of_files
from contrastive.encoders.kinds import encoder_kind
from contrastive.encoders.models import load_model, model_of_spec, untrained
from contrastive.encoders.texts import Tokenizer, build_tokenizer
from contrastive.evaluation.by_class import padded_and_flipped
from contrastive.evaluation.clusters import Clusters
from contrastive.evaluation.embed import encode_images, encode_texts
from contrastive.evaluation.facts import SCRIPTS, read_facts
from contrastive.evaluation.measure import Towers

import numpy as np
import torch
from safetensors.torch import load_file

# options that change a training set alone, at their values in an evaluation
TRAINING_ONLY = {"unfold_captions": False, "caption_noise": 0.0, "extra_captions": ""}
NUM_QUERIES = 16_384  # training queries that are drawn where there is no queue; NCL's queue
# The dual softmax of CLIP-ViP, at its temperature. Here it runs over the queries in both
# directions. In CLIP-ViP's code the one of video -> text runs over the candidates, which does not
# change their order.
DSL_TAU = 0.01
# flags of eval.py that are compared with those of the run
COMPARED_FLAGS = (
    "normalize", "queue_size", "text_length", "knn_features", "image_column", "caption_column",
    "label_column", "same_text", "class_names", "prompts")


class EvaluatedModel:
    """The model under evaluation.

    Args:
        args: flags of eval.py.
        device: where it is evaluated.

    Attributes:
        towers: Towers, on the device.
        flags: flags of its run; {} for a model by name.
        trained_on: name of its data set; None for a model by name.
        facts: EvaluationFacts of its run.
        queues: {texts, videos: (K, D), gamma: (1,)} of a run of ncl.py, else {}.
        clusters: Clusters of a run of mmts.py, else None.
        gamma: temperature of --normalize; 0 = nothing is normalised.
        folder: where the result goes.
    """

    def __init__(self, args, device):
        self.args, self.device = args, device
        self.run = Path(args.checkpoint)
        self.towers, saved_flags = open_model(args, device)
        self.flags = saved_flags or {}
        self.trained_on = self.flags.get("dataset")
        self.facts = read_facts(self.run)
        self.knn_features = args.knn_features or self.facts.knn_features
        self.queues = self.read_queues()
        self.clusters = None
        if (self.run / "clusters.json").is_file():
            self.clusters = Clusters(self.run, device)
        self.gamma = self.temperature()
        self.meta_data = read_json(self.run / "meta_data.json", {})  # of a run of mama.py
        self.compare_flags(saved_flags)
        self.folder = self.make_folder()

    def read_queues(self):
        """The queues of a run of ncl.py; {} if it has none, and with --split train of any set."""
        file = self.run / "queues.safetensors"
        if self.args.split == "train" or not file.is_file():
            return {}
        with opening(file):
            return load_file(file)

    def temperature(self):
        """The temperature of --normalize, and of the biases by the queues of a run of ncl.py.

        Raises: UserError if the run has no single one.
        """
        if self.args.gamma:
            return self.args.gamma
        if self.args.normalize == "dsl":
            return DSL_TAU  # that of a run, such as MAMA's 1, may do nothing
        if self.queues and self.facts.tau is not None:  # ncl.py --loss max-margin trains none
            return self.queues["gamma"].item()
        if self.args.normalize == "none" or self.towers.tokenizer is None:
            return 0.0
        return temperature_of_run(self.facts, self.run)

    def compare_flags(self, saved_flags):
        """Prints the flags whose values differ from those that the run had."""
        for name in COMPARED_FLAGS:
            value, trained = getattr(self.args, name), saved_flags.get(name)
            if trained is not None and value not in ("", 0, trained):
                print_main(f"{flag_of(name)} {value}: {trained} in training")
        value = self.args.frames
        trained = saved_flags.get("eval_frames") or saved_flags.get("frames")
        if value and trained and value != trained:
            print_main(f"--frames {value}: {trained} in the evaluations of the run")

    def make_folder(self):
        """The folder of the result."""
        if self.args.output_dir:
            folder = Path(self.args.output_dir)
        elif self.flags:
            folder = self.run / "eval"
        else:
            folder = Path("runs/eval") / slug(self.args.checkpoint)
        with opening(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def build_untrained(self):
        """The run's tower at random weights; None for a model by name."""
        if not self.flags:
            return None
        return untrained(read_json(self.run / "model.json"), self.flags["seed"])

    @functools.cached_property
    def training_set(self):
        """The training set of the run as it is now, if it is the user's own; None if it is not, or
        cannot be read. Prints a warning if it cannot be read, or has changed since the run."""
        name = self.trained_on
        if name is None or find_data_set(name) is not None:
            return None
        options = data_options(argparse.Namespace(**self.flags)).replace(
            by_class=self.towers.tokenizer is None, **TRAINING_ONLY)
        try:
            if self.facts.long_tail:
                train = labelled_sets(name, options)["train"]
            else:
                train = load_data(name, "train", options)
        except EmptySplit:
            return None  # a copy with the test part alone
        except UserError as error:
            print_main(f"WARNING: {name} cannot be read, so rows that were trained on count, too "
                       f"({error})")
            return None
        saved = read_json(self.run / "summary.json", {}).get("training_set")
        if saved and identity_of_files(train) != saved:
            print_main(f"WARNING: {name} has changed since the run, which trained on other rows of "
                       f"it; "
                       "rows that were trained on may count, too")
        return train

    @functools.cached_property
    def extra_pairs(self):
        """The --extra-pairs of the run that can be read: a list of Data."""
        pairs = []
        for word in self.flags.get("extra_pairs", ()):
            try:
                pairs.append(open_pairs(word, argparse.Namespace(**self.flags)))
            except UserError as error:
                print_main(f"WARNING: --extra-pairs {word} of the run cannot be read, so rows that "
                           f"were "
                           f"trained on count, too ({error})")
        return pairs

    def picture(self, kind, name):
        """The path of a picture of a data set."""
        return self.folder / f"{kind}_{slug(name)}.png"


class EvaluatedSplits:
    """The splits of a data set as the run of a model read them: with its long tail, but without its
    meta-data and what else only training had.

    Args:
        model: EvaluatedModel.
        name: the data set.
        folder: its local copy, or "".
    """

    def __init__(self, model, name, folder):
        self.model, self.name = model, name
        options = data_options(argparse.Namespace(**model.flags), name, folder)
        options = options.overridden_by(model.args)
        if model.args.frames:
            options = options.replace(eval_frames=0)
        self.options = options.replace(
            modalities=getattr(model.towers.model, "modalities", "v"),
            image_size=model.towers.transform.size, test_as_whole=name != model.trained_on,
            **TRAINING_ONLY)
        if model.towers.tokenizer is None and find_data_set(name) is None:
            self.options = self.options.replace(by_class=True)  # a table needs no captions
        self.opened = {}  # {split: Data} of those that have been opened
        self.long_tail = {}  # {split: Data}
        if model.facts.long_tail and name == model.trained_on:
            self.long_tail = labelled_sets(name, self.options)
            if model.facts.train_features == "augmented" and model.args.split != "train":
                self.long_tail["train"] = padded_and_flipped(
                    self.long_tail["train"], model.flags["seed"])

    @property
    def few_shot(self):
        """The few-shot images of the run; None if it has none."""
        return self.long_tail.get("few-shot")

    def open(self, split):
        """The Data of a split. Raises: EmptySplit if there is no such split."""
        if split not in self.opened:
            self.opened[split] = self.read(split)
        return self.opened[split]

    def read(self, split):
        """The Data of a split, from its files. Raises: EmptySplit if there is no such split."""
        training_sets = self.training_sets(split)
        if not self.long_tail:
            data = load_data(self.name, split, self.options)
            data = without_trained(data, *training_sets)
        elif split in self.long_tail:
            data = self.long_tail[split]
        else:
            raise EmptySplit(f"{self.name} has no {split} split, as in the run")
        meta_data = set(self.model.meta_data.get(f"{self.name} {split}", ()))
        if not meta_data:
            return data
        # mama.py has learnt its weights from these examples
        return data.select([row for row, key in enumerate(data.keys()) if key not in meta_data])

    def training_sets(self, split):
        """What the run trained on and whose files are left out of a split: a list of Data.

        They are its data set, if both are the user's own, and, for val and test, its --extra-pairs.
        Of a set that the run itself evaluated nothing has to be left out: training has left out
        the pairs of its clips.
        """
        result = []
        if self.model.trained_on is None:
            return result
        if find_data_set(self.name) is None:
            train = self.model.training_set  # warns if it has changed, also where it is this set
            if train is not None and self.name != self.model.trained_on:
                result.append(train)
        if split != "train" and not self.was_evaluated():
            result += self.model.extra_pairs
        return result

    def was_evaluated(self):
        """Whether the run itself evaluated this set."""
        words = self.model.flags.get("eval_datasets") or [self.model.trained_on]
        names = [resolve_name(partition_name(word, "=")[0]) for word in words]
        return resolve_name(self.name) in names


# ======================================================= the model ================================
def open_model(args, device):
    """Opens --checkpoint: the folder of a run, or a CLIP by name at its own size.

    Returns: Towers on the device; the flags of the run, {} for a CLIP by name.
    Raises: UserError for a --text-length that the text encoder of the run has not learnt.
    """
    run = Path(args.checkpoint)
    if not (run / "args.json").is_file():
        return open_clip_by_name(args, device), {}
    model, tokenizer, transform = load_model(run)
    if args.text_length and tokenizer is not None:
        spec = read_json(run / "model.json")
        trained_length = spec["text_length"]
        if spec["text_encoder"] == "small" and args.text_length > trained_length:
            raise UserError(f"--text-length {args.text_length}: the small text encoder of the run "
                            f"has learnt the positions of {trained_length} tokens; give "
                            f"{trained_length} or less")
        tokenizer = Tokenizer(tokenizer.tokenizer, args.text_length, tokenizer.clean)
    return Towers(model.to(device), tokenizer, transform), read_json(run / "args.json")


def open_clip_by_name(args, device):
    """The Towers of a CLIP by its transformers id or folder, after clip_vip: with CLIP-ViP's
    temporal embeddings."""
    from transformers import AutoConfig
    if encoder_kind(args.checkpoint).family == "clip_vip" and not args.init_from:
        raise UserError(f"--checkpoint {args.checkpoint}: CLIP-ViP's proxies would be random; give "
                        "its weights, such as --init-from pretrain_clipvip_base_32.pt")
    name = args.checkpoint.removeprefix(encoder_kind(args.checkpoint).prefix)
    with opening(f"--checkpoint {name} (no args.json of a run there, so a CLIP by name)"):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if config.model_type != "clip":
        raise UserError(f"--checkpoint {name}: neither the folder of a run nor a CLIP, but "
                        f"{config.model_type}")
    tokenizer = build_tokenizer(name, args.text_length or 77)
    spec = dict(
        image_encoder=args.checkpoint, text_encoder=name, embed_dim=config.projection_dim,
        image_size=config.vision_config.image_size, text_length=77, text_pooling="cls",
        image_stats="encoder", eval_resize="crop")
    torch.manual_seed(42)
    model, transform = model_of_spec(spec, tokenizer, True, args.init_from)
    transform.bicubic = True  # as its own processor
    return Towers(model.eval().to(device), tokenizer, transform)


def temperature_of_run(facts, run):
    """The temperature of a run: the learnt one, or its flag.

    Raises: UserError if it has no single one.
    """
    if facts.tau is None:
        raise UserError("--normalize: the run has no single temperature (none, or its own change "
                        "over time or pairs); give --gamma, such as the middle of them")
    if not facts.learnable_tau:
        return facts.tau
    with opening(run / "own.safetensors"):
        return load_file(run / "own.safetensors")["tau.log_tau"].exp().item()


def resolve_name(name):
    """The name of a data set; for own data its full path, however it is written."""
    path = Path(name).expanduser()
    if name and path.exists():
        return path.resolve()
    return name


# ======================================================= training queries =========================
def has_queue(model, splits):
    """Whether a data set is that of a run of ncl.py, which has queues of its training queries."""
    return bool(model.queues) and splits.name == model.trained_on


def open_query_data(model, splits):
    """The train split from which --normalize queue draws its queries; None if it needs none.

    Args: model: EvaluatedModel. splits: EvaluatedSplits.
    Raises: UserError if there is none, or if it is a stream.
    """
    args = model.args
    if args.normalize != "queue" or args.as_trained or has_queue(model, splits):
        return None
    train = splits.open("train")
    if train.streamed:
        raise UserError(f"{splits.name}: --normalize queue: the checkpoint has no queue, and the "
                        "training set is a stream, from which no queries are drawn; give "
                        "--normalize none")
    return train


def training_queries(model, splits, query_data):
    """Embeddings of training queries for --normalize: the queues of a run of ncl.py, else
    those of randomly drawn training examples and of their captions.

    Args:
        model: EvaluatedModel.
        splits: EvaluatedSplits.
        query_data: as open_query_data returns it.
    Returns: texts, videos: (K, D) each. Both are empty if nothing is needed: for dsl; for oracle
        without a queue; with the run's own --normalize on a set without a queue.
    """
    args = model.args
    script = model.flags.get("script", "ncl")
    if script not in SCRIPTS:
        print_main(f"WARNING: --normalize: by ncl.py's functions; those of {script}.py may differ")
    beginning = f"{splits.name}: --normalize {args.normalize}: by"
    gamma_words = f"gamma {model.gamma:.3g}"
    if args.normalize in ("oracle", "dsl"):
        print_main(f"{beginning} all test queries, so no fair result; {gamma_words}")
    if args.normalize != "dsl" and has_queue(model, splits):
        texts = model.queues["texts"][-args.queue_size:]  # of size 0: all
        videos = model.queues["videos"][-args.queue_size:]
        source = "the run's queue"
    elif query_data is not None:
        texts, videos = draw_training_queries(model, query_data)
        source = "its train split"
    else:
        return (), ()
    if args.normalize == "queue":
        print_main(f"{beginning} {len(texts):,} texts and {len(videos):,} items of {source}; "
                   f"{gamma_words}")
    return texts, videos


def draw_training_queries(model, train):
    """Embeddings of randomly drawn captions and of randomly drawn training examples, (K, D) each;
    their numbers may differ."""
    most = model.args.queue_size or NUM_QUERIES
    encoder, tokenizer, transform = model.towers
    rows = np.sort(random_rows(len(train), most))  # encode_images returns them in this order
    images = encode_images(
        encoder, train, transform, model.device, workers=model.args.workers, rows=rows)
    captions = []
    for row in images.index:
        captions += train.captions(row)
    captions = [captions[k] for k in random_rows(len(captions), most)]
    texts = encode_texts(encoder, tokenizer, captions, model.device)
    # in a random order, because Fig. 5 of NCL takes the last 16, 32, ... of them
    return texts, images.image[random_rows(len(images.image), most)]


def random_rows(n, most):
    """At most so many of the numbers 0 to n - 1, in a random order."""
    return np.random.default_rng(42).permutation(n)[:most]
