"""The image and the text encoder of a run, the view of an image that they read, and the model of a
finished run."""

import functools
from pathlib import Path

from contrastive.data.pixels import decode, pixels_of
from contrastive.encoders.base import (
    STATS, SmallText, Tower, TwoTower, hub_encoder, mask_of_body, masked_mean)
from contrastive.encoders.kinds import encoder_kind
from contrastive.encoders.questions import QuestionAnswerer
from contrastive.encoders.texts import Tokenizer
from contrastive.encoders.towers import freeze_bodies, freeze_unused, image_tower
from contrastive.encoders.vast import Vast, bert_tower, subtitle_tokens
from contrastive.encoders.vgt import VGT
from contrastive.encoders.weights import init_from
from contrastive.core.files import read_json
from contrastive.core.processes import UserError, opening, print_main

import torch
import torch.nn as nn
import torch.nn.functional as F

MAX_ASPECT_RATIO = 20  # of an image that is scaled; of a longer one the centre is cut out first


# ============================================ view of evaluation ==================================
@functools.lru_cache
def channel_values(values, device):
    """Three numbers as a (3, 1, 1) tensor, made once: each copy to a GPU would wait for it."""
    return torch.tensor(values, device=device)[:, None, None]


class EvalTransform:
    """The deterministic view of an image: resized, cut and normalised.

    Args:
        size: pixels of a side of the view.
        mean, std: statistics of the pixels, three numbers each.
        resize: "crop" scales the short side and cuts out the centre; "squash" changes the aspect
            ratio, as the CC3M trainer does.
        part: part of the short side that "crop" keeps; 1 = all of it, 0.875 = resize to 256 and
            cut out 224.
        bicubic: interpolate as CLIP's own view does; else bilinear, as the views of training.

    Attributes:
        subtitle_tokens: function of subtitles -> {input_ids, attention_mask}, if the model reads
            them (VAST).
    """

    subtitle_tokens = None

    def __init__(self, size, mean, std, resize="crop", part=1.0, *, bicubic=False):
        self.size = size
        self.mean = tuple(mean)
        self.std = tuple(std)
        self.resize = resize
        self.short = round(size / part)
        self.bicubic = bicubic

    def raw(self, image):
        """(..., 3, H, W) uint8 -> (..., 3, size, size) uint8; features (float) stay as they are."""
        if image.is_floating_point():
            return image
        from torchvision.transforms import v2

        modes = v2.InterpolationMode
        interpolation = modes.BILINEAR
        if self.bicubic:
            interpolation = modes.BICUBIC
        side = [self.short]
        if self.resize == "squash":
            side = [self.size, self.size]
        else:
            # scaled first, an image of 30,000 x 1 pixels would take gigabytes
            longest = MAX_ASPECT_RATIO * min(image.shape[-2:])
            if max(image.shape[-2:]) > longest:
                height, width = image.shape[-2:]
                image = v2.functional.center_crop(
                    image, [min(height, longest), min(width, longest)])
        resized = v2.functional.resize(image, side, interpolation=interpolation, antialias=True)
        return v2.functional.center_crop(resized, [self.size, self.size])

    def normalise(self, x):
        """(..., 3, S, S) float in 0..1 -> normalised."""
        mean = channel_values(self.mean, x.device)
        std = channel_values(self.std, x.device)
        return (x - mean).div_(std)

    def __call__(self, image):
        """(3, H, W) uint8, a PIL image or a path -> (3, size, size) float, normalised.

        PIL images and files are turned upright, and transparency is over white. Precomputed
        features (T, F) are returned as they are.

        Raises:
            ValueError: for a float image, which may be normalised already.
        """
        if isinstance(image, (str, Path)):
            image = decode(image)
        elif not torch.is_tensor(image):
            image = pixels_of(image)
        if not image.is_floating_point():
            return self.normalise(self.raw(image).float() / 255)
        if image.ndim > 2 and image.shape[-3] == 3:
            raise ValueError("pixels are uint8, 0..255; a float image may be normalised already")
        return image


# ================================================ encoders ========================================
def projection_layer(width, embed_dim, bias=False):
    """The layer from features to embeddings; the identity if embed_dim is 0."""
    if not embed_dim:
        return nn.Identity()
    return nn.Linear(width, embed_dim, bias=bias)


class Encoder(nn.Module):
    """A body, which may be frozen, and a projection, which always learns.

    Attributes:
        frozen: whether the body does not learn, and stays in eval mode.
    """

    frozen = False

    def freeze(self):
        """Freezes the body."""
        self.frozen = True
        self.body.requires_grad_(False)
        self.train(self.training)

    def train(self, mode=True):
        super().train(mode)
        if self.frozen:
            self.body.eval()
        return self


class VisionEncoder(Encoder):
    """Images or clips -> features (B, width) and embeddings (B, D).

    forward: (B, 3, S, S), or (B, T, 3, S, S), of which it takes the mean over the T frames; or
    features of images (B, width) or of the frames of clips (B, T, width), computed before.

    Args:
        name: as --image-encoder takes it; encoders/kinds.py has the table.
        embed_dim: D; 0 = only features.
        pretrained: read published weights.
        image_size: pixels of a side.
        config: of a transformers model that is rebuilt, as a dict.
        features: (T, F) of precomputed features.
        frames: T, for an encoder that is made for one number of frames.
        projection_bias: whether a new projection has a bias.
    """

    def __init__(self, name, embed_dim, pretrained=True, image_size=224, config=None, *,
                 projection_bias=False, features=(0, 0), frames=0):
        super().__init__()
        self.name = name
        self.kind = encoder_kind(name, config)
        tower = image_tower(
            name, self.kind, embed_dim, pretrained=pretrained, image_size=image_size,
            config=config, num_features=features[1], num_frames=frames)
        self.body = tower.body
        self.width = tower.width
        self.config = tower.config
        self.model_type = tower.model_type
        self.is_clip = tower.model_type.startswith("clip")
        self.stats = tower.stats
        self.frame_features = tower.frame_features

        clip_projection = tower.projection
        if self.kind.family == "ssb":
            self.projection = nn.Identity()
        elif fits(clip_projection, embed_dim):
            self.projection = clip_projection
        else:
            self.projection = projection_layer(self.width, embed_dim, projection_bias)
            if clip_projection is not None and pretrained and embed_dim:
                print_main(f"--embed-dim {embed_dim}: the projections of {name}, of width "
                           f"{clip_projection.out_features}, are replaced by new ones")

    def forward(self, pixels):
        if self.are_features(pixels):
            features = pixels.flatten(0, -2)                             # (B * T, width)
        else:
            features = self.frames(pixels)
        return self.pool(features, pixels)

    def are_features(self, pixels):
        """Whether these are features of this encoder, computed before."""
        return pixels.ndim < 4 and not self.kind.reads_files

    def frames(self, pixels):
        """Features of each frame, (B * T, width), or of each clip, (B, width).

        Video Swin returns those of fewer time steps than frames.
        """
        if self.kind.whole_clips:
            return self.body(pixels)
        if self.frame_features:
            return self.frame_features(self, pixels)
        frames = pixels
        if pixels.ndim == 5:
            frames = pixels.flatten(0, 1)                                # (B * T, 3, S, S)
        if self.kind.family == "small":
            frames = frames.contiguous(memory_format=torch.channels_last)
        return self.body(frames)

    def pool(self, features, pixels):
        """Features of frames -> features (B, width) and embeddings (B, D) of images or clips."""
        embedding = self.projection(features)                            # (B * T, D)
        has_frames = pixels.ndim == 5
        if self.are_features(pixels):
            has_frames = pixels.ndim == 3
        if has_frames and not self.kind.whole_clips:
            B = len(pixels)
            features = features.unflatten(0, (B, -1)).mean(1)            # (B, width)
            embedding = F.normalize(embedding.float(), dim=-1)
            embedding = embedding.unflatten(0, (B, -1)).mean(1)          # (B, D)
        return features, embedding


def fits(clip_projection, embed_dim):
    """Whether a CLIP's own projection is linear and of width D, as wanted; False for None."""
    return clip_projection is not None and clip_projection.out_features == embed_dim


class TextEncoder(Encoder):
    """Token ids (B, L), or features (B, width) computed before -> embeddings (B, D).

    Args:
        name: "small", or a transformers id or folder.
        embed_dim: D; 0 = the model's own projection, or none if it has none.
        pretrained: read published weights.
        length: most tokens of a text, of the small encoder.
        vocabulary: number of tokens of the small encoder.
        pooling: "cls" or "mean" (a CLIP has its own), or "ssb", SSB's head.
        config: of a transformers model that is rebuilt, as a dict.
        projection_bias: whether a new projection has a bias.
        tower: Tower that takes the place of that of the name.
    """

    def __init__(self, name, embed_dim, pretrained=True, length=32, vocabulary=0, *,
                 pooling="cls", projection_bias=False, config=None, tower=None):
        super().__init__()
        if tower is None and name == "small":
            tower = Tower(SmallText(vocabulary, length), 128)
        elif tower is None:
            tower = hub_encoder(name, "text", pretrained, config)
        self.name = name
        self.body = tower.body
        self.width = tower.width
        self.config = tower.config
        self.model_type = tower.model_type
        self.is_clip = tower.model_type.startswith("clip")
        self.pooling = pooling
        self.head = None
        if pooling == "ssb":
            from contrastive.encoders.ssb import TextHead

            self.head = TextHead(self.width, embed_dim)
        if self.head:
            self.projection = nn.Identity()
        elif fits(tower.projection, embed_dim or tower.projection_width):
            self.projection = tower.projection
        else:
            self.projection = projection_layer(self.width, embed_dim, projection_bias)

    def forward(self, input_ids=None, attention_mask=None, features=None):
        if features is None:
            _, features = self.states(input_ids, attention_mask)         # (B, width)
        return self.projection(features)

    def words(self, input_ids, attention_mask):
        """States of the tokens, (B, L, width), and embeddings of the texts, (B, D)."""
        states, features = self.states(input_ids, attention_mask)
        return states, self.projection(features)

    def states(self, input_ids, attention_mask):
        """States of the tokens, (B, L, width), and features of the texts, (B, width)."""
        if not self.model_type:
            states, pooled = self.body(input_ids, attention_mask)        # (B, L, width), (B, width)
        else:
            states, pooled = self.transformers_states(input_ids, attention_mask)
        if self.head:
            pooled = self.head(states, attention_mask)                   # (B, D)
        return states, pooled

    def transformers_states(self, input_ids, attention_mask):
        """States of the tokens and of the texts, (B, L, width) and (B, width)."""
        mask = attention_mask
        if self.is_clip:
            mask = None  # its attention is causal, and padding follows the end token
        elif self.model_type in ("bert", "distilbert", "t5"):
            mask = mask_of_body(self.body, attention_mask)
        output = self.body(input_ids=input_ids, attention_mask=mask)
        states = output.last_hidden_state
        if self.is_clip:
            pooled = output.pooler_output
        elif self.pooling == "mean":
            pooled = masked_mean(states, attention_mask)
        else:
            pooled = states[:, 0]
        return states, pooled


# ============================================ model of a run ======================================
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


def model_of_spec(spec, tokenizer, pretrained, weights=""):
    """The model of a spec, and the view of an image that it reads.

    Args:
        spec: the content of model.json: the model flags and what this function adds to them, the
            statistics of the pixels and the configs of transformers models.
        tokenizer: of the text encoder, or None.
        pretrained: read published weights.
        weights: file for init_from, or "". It stands for the published weights of an image encoder
            of timm or torchvision, which are then not read.

    Returns: TwoTower, whose `from_file` has the names of the tensors in `weights`; EvalTransform.

    Raises:
        UserError: if `weights` has no image encoder, which would then be random.
    """
    kind = encoder_kind(spec["image_encoder"], spec.get("vision_config"))
    text_pretrained = pretrained
    vision_pretrained = pretrained
    if weights and kind.family == "vast":
        text_pretrained = False  # they hold all encoders
    if weights and kind.family not in ("transformers", "clip_vip"):
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

    are_small = kind.family == "small" and spec["text_encoder"] in ("small", "")
    if not are_small:
        freeze_unused(model, tokenizer, spec)
    freeze_bodies(model, spec.get("freeze", "none"))
    mean, std = spec["stats"]
    transform = EvalTransform(
        spec["image_size"], mean, std, spec["eval_resize"], spec.get("eval_crop", 1.0))
    if tokenizer and "s" in spec.get("modalities", ""):
        transform.subtitle_tokens = functools.partial(subtitle_tokens, tokenizer)
    return model, transform


def initial_model(spec, tokenizer, pretrained, vision_pretrained):
    """The model of a spec: a TwoTower or a VAST, or with questions a QuestionAnswerer or a VGT.

    Args:
        pretrained: read published weights of the text encoder.
        vision_pretrained: read those of the image encoder.
    """
    questions = spec.get("questions") or {}
    is_vgt = questions.get("model") == "vgt"
    is_vast = encoder_kind(spec["image_encoder"]).family == "vast"
    if is_vast and questions:
        raise UserError("--image-encoder vast: it answers no questions; give --task retrieval, or "
                        "another encoder")
    embed_dim = spec["embed_dim"]
    if is_vgt:
        embed_dim = 0  # it has projections of its own
    vision_dim = embed_dim
    if is_vast:
        vision_dim = 0
    # the spec of a CLIP by name, and of most scripts, lacks the key
    projection_bias = spec.get("projection_bias", False)
    vision = VisionEncoder(
        spec["image_encoder"], vision_dim, vision_pretrained, spec["image_size"],
        spec.get("vision_config"), features=spec.get("features", (0, 0)),
        frames=spec.get("frames", 0), projection_bias=projection_bias)
    text = None
    if spec["text_encoder"]:
        vocabulary = 0
        if tokenizer:
            vocabulary = len(tokenizer.tokenizer)
        pooling = spec["text_pooling"]
        tower = None
        if is_vast:
            pooling = "cls"
            tower = bert_tower(
                spec["image_encoder"], spec["text_encoder"], pretrained=pretrained,
                vocabulary=vocabulary, config=spec.get("text_config"))
        text = TextEncoder(
            spec["text_encoder"], embed_dim, pretrained, spec["text_length"], vocabulary,
            pooling=pooling, config=spec.get("text_config"), tower=tower,
            projection_bias=projection_bias)
    complete_spec(spec, vision, text)
    if is_vast:
        return Vast(vision, text, embed_dim, spec["modalities"])
    if is_vgt:
        return VGT(vision, text, spec["embed_dim"], tokenizer, **questions)
    if questions:
        return QuestionAnswerer(vision, text, **questions)
    return TwoTower(vision, text)


def complete_spec(spec, vision, text):
    """Adds to a spec what rebuilds its encoders offline."""
    choices = STATS | {"encoder": vision.stats}
    mean, std = spec.get("stats") or choices[spec["image_stats"]]
    spec["stats"] = [list(mean), list(std)]
    spec["vision_config"] = vision.config
    spec["text_config"] = None
    if text:
        spec["text_config"] = text.config


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
                run_dir / "tokenizer", spec["text_length"], spec["clean_captions"])
        model, transform = model_of_spec(spec, tokenizer, pretrained=False)
        model.load_state_dict(load_file(run_dir / "model.safetensors"))
    return model.eval(), tokenizer, transform
