"""The model of a run, as its flags say."""

import copy
import functools

from contrastive.data.clips import feature_shape
from contrastive.data.table import frames_of
from contrastive.encoders.base import channels_last, clip_width
from contrastive.encoders.kinds import encoder_kind
from contrastive.encoders.models import model_of_spec, spec_of
from contrastive.encoders.texts import build_tokenizer
from contrastive.core.processes import UserError, print_main

VAST_TEXT_ENCODER, VAST_WIDTH = "google-bert/bert-base-uncased", 512
TOKENIZER_TEXTS = 200_000  # captions from which a tokenizer learns its vocabulary


def adjust_flags_to_encoder(args):
    """The flags, in which a CLIP as --image-encoder is the text encoder as well, and VAST has its
    own.

    --text-encoder and --embed-dim stay if the command line has them, and in a resumed run.
    """
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
    """
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
    tower, transform = model_of_spec(spec, tokenizer, pretrained, weights)
    tower.spec, tower.pretrained = spec, pretrained
    tower.weights_in_words = describe_weights(tower, pretrained, weights)
    if run.has_checkpoint():
        tower.weights_in_words = "weights of the checkpoint"
    is_frozen = tower.vision.frozen or getattr(tower.text, "frozen", False)
    if is_frozen and not args.pretrained and not args.init_from:
        print_main(f"WARNING: --freeze {args.freeze}: the weights are random and will stay so; add "
                   "--pretrained or --init-from")
    tower.to(run.device)
    if run.device.type == "cuda":
        channels_last(tower.vision)
    if tokenizer:
        tokenizer.device = run.device  # not before: model_of_spec tries texts where the model is
    return tower, tokenizer, transform


def input_spec(args, train):
    """What the spec says of the inputs of the image encoder."""
    kind = encoder_kind(args.image_encoder)
    spec = {}
    if kind.reads_files:
        spec["features"] = feature_shape(train, args.image_encoder)
    if kind.fixed_frames and frames_of(train):
        spec["frames"] = frames_of(train)
    if kind.family == "vast":
        spec["modalities"] = modalities_of(args, train)
    return spec


def modalities_of(args, train):
    """Those of --modalities that the training data have.

    Raises: UserError if the command line asks for others, or if none is left.
    """
    if not hasattr(args, "modalities"):
        raise UserError(f"--image-encoder {args.image_encoder}: this script does not train it; use "
                        "python -m variants.mmts_vast")
    letters = args.modalities
    if letters != "v":
        letters = train.available_modalities()
    if not letters:
        raise UserError(f"--modalities {args.modalities}: {train.name} has none of them; give v")
    if letters != args.modalities:
        if "--modalities" in args.command_line:
            raise UserError(f"--modalities {args.modalities}: {train.name} has no more than "
                            f"{letters}; give that, or leave the flag out")
        print_main(f"--modalities {args.modalities} -> {letters}, which {train.name} has")
    return letters


def describe_weights(tower, pretrained, weights):
    """The words of the banner on the first weights."""
    if weights:
        words = f"weights of {weights}"
        is_published = pretrained and tower.text is not None and tower.text.model_type
        if is_published and not any(name.startswith("text.") for name in tower.from_file):
            words += "; published weights of the text encoder"
        return words
    if not pretrained:
        return "from scratch"
    body = getattr(tower.vision.body, "vit", tower.vision.body)
    timm = getattr(body, "pretrained_cfg", {})
    if not timm.get("tag"):
        return "published weights, where there are some"
    return f"published weights ({timm['architecture']}.{timm['tag']}), where there are some"
