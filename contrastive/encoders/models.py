"""The model of a run, as its flags say, and that of a finished run."""

import copy
import functools
from pathlib import Path

from contrastive.core.files import read_json
from contrastive.core.processes import UserError, opening, print_main
from contrastive.core.words import short_path
from contrastive.data.clips import feature_shape
from contrastive.data.table import frames_of
from contrastive.encoders.base import STATS, TwoTower, channels_last, num_positions
from contrastive.encoders.freezing import freeze_bodies, freeze_unused
from contrastive.encoders.image_encoders import check_image_encoder, clip_width, encoder_kind
from contrastive.encoders.texts import Tokenizer, build_tokenizer
from contrastive.encoders.towers import TextEncoder, VisionEncoder
from contrastive.encoders.transform import EvalTransform
from contrastive.encoders.weights import init_from

VAST_TEXT_ENCODER, VAST_WIDTH = "google-bert/bert-base-uncased", 512
TOKENIZER_TEXTS = 200_000  # captions from which a tokenizer learns its vocabulary
MODEL_FLAGS = (
    "image_encoder", "text_encoder", "embed_dim", "projection_bias", "freeze",
    "image_size", "text_length", "text_pooling", "image_stats", "eval_resize", "eval_crop",
    "clean_captions")


def spec_of(args):
    """The model flags of a script, for model_of_spec.

    A script without texts has only features, on which it puts its own head.
    """
    spec = {name: getattr(args, name) for name in MODEL_FLAGS if hasattr(args, name)}
    if not hasattr(args, "text_encoder"):
        spec["text_encoder"] = ""
        spec["embed_dim"] = 0
    return spec


# ============================================ from flags ==========================================
def adjust_flags_to_encoder(args):
    """The flags; if --image-encoder is a CLIP or VAST, with its text encoder and its width.

    --text-encoder and --embed-dim stay if the command line has them, and in a resumed run.

    Raises:
        UserError: if no image encoder has that name.
    """
    check_image_encoder(args.image_encoder)
    if args.resume:
        return args
    chooses_image = "--image-encoder" in args.command_line
    chooses_text = "--text-encoder" in args.command_line
    if not chooses_image or chooses_text or not getattr(args, "text_encoder", ""):
        return args
    kind = encoder_kind(args.image_encoder)
    text_encoder = args.image_encoder.removeprefix(kind.prefix)
    width = clip_width(args.image_encoder)
    if args.image_encoder == "vast":
        text_encoder, width = VAST_TEXT_ENCODER, VAST_WIDTH
    if not width:
        return args
    args = copy.copy(args)
    args.text_encoder = text_encoder
    if "--embed-dim" not in args.command_line:
        args.embed_dim = width
    return args


def build_model(args, train, run, texts=None, questions=None):
    """Both encoders of a run, on its device.

    Args:
        train: training data, from whose captions a tokenizer learns.
        run: its folder, device and checkpoints.
        texts: function () -> the texts from which a tokenizer learns in place of the captions.
        questions: keywords of QuestionAnswerer.

    Returns: TwoTower, whose `spec` is the content of model.json; tokenizer or None; EvalTransform.

    Raises:
        UserError: if an encoder cannot be built, or cannot read what the flags say.
    """
    check_image_encoder(args.image_encoder)
    spec = spec_of(args)
    tokenizer = None
    if spec["text_encoder"]:
        texts = texts or functools.partial(train.first_captions, TOKENIZER_TEXTS)
        tokenizer = build_tokenizer(
            args.text_encoder, args.text_length, texts, run.folder / "tokenizer",
            spec.get("clean_captions", False), keep=bool(args.resume), start=args.init_from)
    spec.update(input_spec(args, train))
    if questions:
        spec["questions"] = questions
    pretrained, weights = args.pretrained, args.init_from
    if run.has_checkpoint():
        pretrained, weights = False, ""  # the checkpoint has the weights
    model, transform = model_of_spec(spec, tokenizer, pretrained, weights)
    if model.text is not None:
        check_text_length(model.text, args.text_length)
    model.spec, model.pretrained = spec, pretrained
    model.weights_in_words = describe_weights(model, pretrained, weights)
    if run.has_checkpoint():
        model.weights_in_words = "weights of the checkpoint"
    is_frozen = model.vision.frozen or getattr(model.text, "frozen", False)
    if is_frozen and not args.pretrained and not args.init_from:
        print_main(f"WARNING: --freeze {args.freeze}: the weights are random and will stay so; add "
                   "--pretrained or --init-from")
    model.to(run.device)
    if run.device.type == "cuda":
        channels_last(model.vision)
    if tokenizer:
        tokenizer.device = run.device  # not before: model_of_spec tries texts where the model is
    return model, tokenizer, transform


def input_spec(args, train):
    """What the spec says of the inputs of the image encoder."""
    kind = encoder_kind(args.image_encoder)
    spec = {}
    if kind.reads_files:
        spec["features"] = feature_shape(train, args.image_encoder)
    if kind.fixed_frames and frames_of(train):
        spec["frames"] = frames_of(train)
    if kind.release == "VAST":
        from contrastive.encoders.vast import modalities_of

        spec["modalities"] = modalities_of(args, train)
    return spec


def check_text_length(text, length):
    """Refuses a --text-length above the positions of a text encoder of transformers."""
    positions = num_positions(text.body)
    if positions and length > positions:
        raise UserError(f"--text-length {length}: {text.name} has {positions} positions; give at "
                        "most that")


def describe_weights(model, pretrained, weights):
    """The words of the banner on the first weights."""
    if weights:
        words = f"weights of {short_path(weights)}"
        is_published = pretrained and model.text is not None and model.text.model_type
        if is_published and not any(name.startswith("text.") for name in model.from_file):
            words += "; published weights of the text encoder"
        return words
    if not pretrained:
        return "from scratch"
    body = getattr(model.vision.body, "vit", model.vision.body)
    timm = getattr(body, "pretrained_cfg", {})
    if not timm.get("tag"):
        return "published weights, where there are some"
    return f"published weights ({timm['architecture']}.{timm['tag']}), where there are some"


# ============================================= from a spec ========================================
def model_of_spec(spec, tokenizer, pretrained, weights=""):
    """The model of a spec, and the view of an image that it reads.

    Args:
        spec: the content of model.json: the model flags and what this function adds to them, the
            statistics of the pixels and the configs of transformers models.
        tokenizer: of the text encoder, or None.
        pretrained: read published weights.
        weights: file for init_from, or "". It replaces the published weights of an image encoder
            of timm or torchvision, which are then not read.

    Returns: TwoTower, whose `from_file` has the names of the tensors in `weights`; EvalTransform.

    Raises:
        UserError: if `weights` has no image encoder, which would then be random.
    """
    kind = encoder_kind(spec["image_encoder"], spec.get("vision_config"))
    text_pretrained = pretrained
    vision_pretrained = pretrained
    if weights and kind.release == "VAST":
        text_pretrained = False  # they hold all encoders
    if weights and not kind.is_transformers:
        vision_pretrained = False
    model = initial_model(spec, tokenizer, text_pretrained, vision_pretrained)
    model.from_file = set()
    if weights:
        model.from_file = set(init_from(model, weights))
    has_image_encoder = any(name.startswith("vision.body.") for name in model.from_file)
    replaces_published = pretrained and not vision_pretrained and kind.has_published_weights
    if replaces_published and not has_image_encoder:
        raise UserError(f"--init-from {weights}: has no image encoder, and {spec['image_encoder']} "
                        "would be random; give --no-pretrained if it is meant to be")

    freeze_unused(model, tokenizer, spec)
    freeze_bodies(model, spec.get("freeze", "none"))
    mean, std = spec["stats"]
    transform = EvalTransform(
        spec["image_size"], mean, std, spec["eval_resize"], spec.get("eval_crop", 1.0))
    if "s" in spec.get("modalities", ""):
        from contrastive.encoders.vast import subtitle_tokens

        transform.subtitle_tokens = functools.partial(subtitle_tokens, tokenizer)
    return model, transform


def initial_model(spec, tokenizer, pretrained, vision_pretrained):
    """The model of a spec: a TwoTower or a Vast, or with questions a QuestionAnswerer or a VGT.

    Args:
        pretrained: read published weights of the text encoder.
        vision_pretrained: read those of the image encoder.
    """
    if "modalities" in spec:
        from contrastive.encoders.vast import build_vast

        model = build_vast(spec, tokenizer, pretrained, vision_pretrained)
        complete_spec(spec, model.vision, model.text)
        return model
    questions = spec.get("questions") or {}
    is_vgt = questions.get("model") == "vgt"
    embed_dim = spec["embed_dim"]
    if is_vgt:
        embed_dim = 0  # it has projections of its own
    # the spec of a CLIP by name, and of most scripts, lacks the key
    projection_bias = spec.get("projection_bias", False)
    vision = VisionEncoder(
        spec["image_encoder"], embed_dim, vision_pretrained, spec["image_size"],
        spec.get("vision_config"), features=spec.get("features", (0, 0)),
        frames=spec.get("frames", 0), projection_bias=projection_bias)
    text = None
    if spec["text_encoder"]:
        vocabulary = 0
        if tokenizer:
            vocabulary = len(tokenizer.tokenizer)
        text = TextEncoder(
            spec["text_encoder"], embed_dim, pretrained, spec["text_length"], vocabulary,
            pooling=spec["text_pooling"], config=spec.get("text_config"),
            projection_bias=projection_bias)
    complete_spec(spec, vision, text)
    if is_vgt:
        from contrastive.encoders.vgt import VGT

        return VGT(vision, text, spec["embed_dim"], tokenizer, **questions)
    if questions:
        from contrastive.encoders.questions import QuestionAnswerer

        return QuestionAnswerer(vision, text, **questions)
    return TwoTower(vision, text)


def complete_spec(spec, vision, text):
    """Adds to a spec what rebuilds its encoders offline."""
    stats = spec.get("stats")
    if not stats and spec["image_stats"] == "encoder":
        stats = vision.stats
    elif not stats:
        stats = STATS[spec["image_stats"]]
    mean, std = stats
    spec["stats"] = [list(mean), list(std)]
    spec["vision_config"] = vision.config
    spec["text_config"] = None
    if text:
        spec["text_config"] = text.config


# ========================================== of a finished run =====================================
def load_model(run_dir):
    """The model of a finished run, on the CPU, in eval mode, without the hub.

    model(transform(image)[None])[0] and model(tokens=tokenizer(["a caption"]))[1] are embeddings
    (1, D) of one space. They are not of unit length: `normalize` them, and their products are
    cosines.

    Returns: (model, tokenizer, transform); the tokenizer is None without texts.

    Raises:
        UserError: if the folder holds no model, or another than model.json says.
    """
    from safetensors.torch import load_file

    run_dir = Path(run_dir)
    tokenizer = None
    spec = read_json(run_dir / "model.json")
    with opening(run_dir):
        if spec["text_encoder"]:
            tokenizer = Tokenizer(
                run_dir / "tokenizer", spec["text_length"],
                spec.get("clean_captions", False))
        model, transform = model_of_spec(spec, tokenizer, pretrained=False)
        model.load_state_dict(load_file(run_dir / "model.safetensors"))
    return model.eval(), tokenizer, transform
