"""The image and the text encoder of a run, the view of an image that they read, and the model of a finished run."""

import functools
from pathlib import Path

from contrastive.data.table import decode

from contrastive.encoders.base import (  # isort: skip
    FROM_FILES, STATS, SmallText, Tower, TwoTower, hub_encoder, masked_mean, small_cnn)
from contrastive.encoders.questions import QuestionAnswerer
from contrastive.encoders.ssb import TextHead, VideoTower
from contrastive.encoders.texts import Tokenizer
from contrastive.encoders.towers import freeze_unused, image_tower
from contrastive.encoders.vgt import VGT
from contrastive.encoders.weights import init_from
from contrastive.engine.processes import UserError, opening, read_json, say

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


@functools.lru_cache
def colours(values, device):
    """Three numbers as (3, 1, 1), kept on the device: each copy would wait for a card."""
    return torch.tensor(values, device=device)[:, None, None]


class EvalTransform:
    """Deterministic view: (3, H, W) uint8, a PIL image or a path -> (3, size, size) float, normalised.

    resize: 'crop' scales the short side and cuts the centre; 'squash' changes the aspect, as the CC3M trainer.
    part: the part of the short side that 'crop' keeps, 1 = all of it; 0.875 = resize to 256, cut 224.
    bicubic: as CLIP's own; else bilinear, as the views of training."""

    def __init__(self, size, mean, std, resize="crop", part=1.0, bicubic=False):
        self.size, self.mean, self.std, self.resize = size, tuple(mean), tuple(std), resize
        self.short, self.bicubic = round(size / part), bicubic

    def raw(self, image):
        """(..., 3, H, W) uint8 -> (..., 3, size, size) uint8; features stay as they are."""
        if image.is_floating_point():
            return image
        from torchvision.transforms import v2
        how = v2.InterpolationMode.BICUBIC if self.bicubic else v2.InterpolationMode.BILINEAR
        side = [self.size, self.size] if self.resize == "squash" else [self.short]
        resized = v2.functional.resize(image, side, interpolation=how, antialias=True)
        return v2.functional.center_crop(resized, [self.size, self.size])

    def normalise(self, x):
        """(..., 3, S, S) float in 0..1 -> normalised."""
        return (x - colours(self.mean, x.device)).div_(colours(self.std, x.device))

    def __call__(self, image):
        if isinstance(image, (str, Path)):
            image = decode(image)
        elif not torch.is_tensor(image):
            image = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        if not image.is_floating_point():
            return self.normalise(self.raw(image).float() / 255)
        if image.ndim > 2 and image.shape[-3] == 3:  # (T, F) are features
            raise ValueError("pixels are uint8, 0..255; a float image may be normalised already")
        return image


class VisionEncoder(nn.Module):
    """Images (B, 3, S, S) or clips (B, T, 3, S, S), mean over T -> features (B, width) and embeddings (B, D).

    name: 'small', 'ssb' (encoders/ssb.py), or one of image_tower.   embed_dim 0: only features.
    """

    def __init__(self, name, embed_dim, pretrained=True, image_size=224, config=None, features=(0, 0), frames=0):
        super().__init__()
        if name == "small":
            tower = Tower(small_cnn().to(memory_format=torch.channels_last), 128)
        elif name == "ssb":
            tower = Tower(VideoTower(features[1], embed_dim), embed_dim)
        else:
            tower = image_tower(name, pretrained, image_size, config, features, frames)
        self.name, self.body, self.width, self.config = name, tower.body, tower.width, tower.config
        self.stats, self.whole_clips, self.read = tower.stats, tower.whole_clips, tower.read
        self.projection = nn.Linear(self.width, embed_dim, bias=False) if embed_dim else nn.Identity()
        if tower.projection is not None and tower.projection.out_features == embed_dim:
            self.projection = tower.projection
        elif tower.projection is not None and pretrained and embed_dim:
            say(f"--embed-dim {embed_dim}: the projections of {name} have width {tower.projection.out_features} and "
                "are replaced by new ones")
        if name == "ssb":
            self.projection = nn.Identity()

    def forward(self, pixels):
        return self.pool(self.frames(pixels), pixels)

    def frames(self, pixels):
        """Features of each frame, (B * T, width); a video tower may return fewer time steps than frames."""
        if self.whole_clips:
            return self.body(pixels)  # (B, width)
        if self.read:
            return self.read(self, pixels)
        frames = pixels.flatten(0, 1) if pixels.ndim == 5 else pixels  # (B * T, 3, S, S)
        if self.name == "small":
            frames = frames.contiguous(memory_format=torch.channels_last)
        return self.body(frames)

    def pool(self, features, pixels):
        """Features of each frame -> features (B, width) and embeddings (B, D) of the images or clips."""
        embedding = self.projection(features)  # (B * T, D)
        if pixels.ndim == 5 and not self.whole_clips:
            B = len(pixels)
            features = features.unflatten(0, (B, -1)).mean(1)  # (B, width)
            embedding = F.normalize(embedding.float(), dim=-1).unflatten(0, (B, -1)).mean(1)  # (B, D)
        return features, embedding


class TextEncoder(nn.Module):
    """Token ids (B, L) -> embeddings (B, D).

    name: 'small' or a transformers id or folder; pooling: 'cls' or 'mean' (CLIP: its own), or 'ssb', SSB's head.
    embed_dim 0: its own projection, or none if it has none."""

    def __init__(self, name, embed_dim, pretrained=True, length=32, vocabulary=0, pooling="cls", config=None):
        super().__init__()
        if name == "small":
            tower = Tower(SmallText(vocabulary, length), 128)
        else:
            tower = hub_encoder(name, "text", pretrained, config)
        self.name, self.body, self.width, self.config = name, tower.body, tower.width, tower.config
        self.pooling, self.is_clip = pooling, bool(self.config) and self.config["model_type"].startswith("clip")
        self.head = TextHead(self.width, embed_dim) if pooling == "ssb" else None
        self.projection = nn.Linear(self.width, embed_dim, bias=False) if embed_dim else nn.Identity()
        if self.head:
            self.projection = nn.Identity()
        elif tower.projection is not None and embed_dim in (0, tower.projection.out_features):
            self.projection = tower.projection

    def forward(self, input_ids, attention_mask):
        return self.words(input_ids, attention_mask)[1]

    def words(self, input_ids, attention_mask):
        """Hidden states of the tokens, (B, L, width), and embeddings (B, D)."""
        if self.name == "small":
            words, out = self.body(input_ids, attention_mask)              # (B, L, width), (B, width)
        else:
            mask = attention_mask  # of a (B, L) one transformers asks whether it is all 1, which waits for a card
            if self.is_clip:
                mask = None                                                # causal, and pads follow the end token
            elif self.config["model_type"] in ("bert", "distilbert", "t5"):
                mask = attention_mask[:, None, None].bool()                # (B, 1, 1, L), which is taken as it is
            found = self.body(input_ids=input_ids, attention_mask=mask)
            words, out = found.last_hidden_state, found.last_hidden_state[:, 0]
            if self.is_clip:
                out = found.pooler_output
            elif self.pooling == "mean":
                out = masked_mean(words, attention_mask)
        if self.head:
            out = self.head(words, attention_mask)                         # (B, D)
        return words, self.projection(out)


SPEC = ("image_encoder", "text_encoder", "embed_dim", "image_size", "text_length", "text_pooling", "image_stats",
        "eval_resize", "eval_crop", "clean_captions")


def spec_of(args):
    """The model flags of a script, for build_model; without texts only features, on which a script puts its head."""
    without = {} if hasattr(args, "text_encoder") else {"text_encoder": "", "embed_dim": 0}
    return {k: getattr(args, k) for k in SPEC if hasattr(args, k)} | without


def build_model(spec, tokenizer, pretrained, weights=""):
    """TwoTower and EvalTransform from a spec (the content of model.json), which holds the model flags.

    weights: a file for init_from, whose image encoder stands for the published one of timm or torchvision."""
    name, asked = spec["image_encoder"], spec.get("questions") or {}
    graph, published = asked.get("model") == "vgt", pretrained and ("/" in name or not weights)
    embed_dim = 0 if graph else spec["embed_dim"]  # VGT has projections of its own
    vision = VisionEncoder(name, embed_dim, published, spec["image_size"], spec.get("vision_config"),
                           spec.get("features", (0, 0)), spec.get("frames", 0))
    text = None
    if spec["text_encoder"]:
        vocabulary = len(tokenizer.tokenizer) if tokenizer else 0
        text = TextEncoder(spec["text_encoder"], embed_dim, pretrained, spec["text_length"], vocabulary,
                           spec["text_pooling"], spec.get("text_config"))
    of_encoder = vision.stats if spec["image_stats"] == "encoder" else STATS[spec["image_stats"]]
    mean, std = spec.get("stats") or of_encoder
    spec.update(stats=[list(mean), list(std)], vision_config=vision.config, text_config=text.config if text else None)
    model = TwoTower(vision, text)
    if graph:
        model = VGT(vision, text, spec["embed_dim"], tokenizer, **asked)
    elif asked:
        model = QuestionAnswerer(vision, text, **asked)
    model.from_file = set(init_from(model, weights)) if weights else set()  # names of tensors
    lacks = weights and not any(tensor.startswith("vision.") for tensor in model.from_file)
    if lacks and pretrained and not published and name not in ("small", *FROM_FILES):
        raise UserError(f"--init-from {weights}: has no image encoder, and {name} would be random; --no-pretrained")
    if name != "small" or spec["text_encoder"] not in ("small", ""):
        freeze_unused(model, tokenizer, spec)
    return model, EvalTransform(spec["image_size"], mean, std, spec["eval_resize"], spec.get("eval_crop", 1.0))


def untrained(spec, seed):
    """The TwoTower of a spec, without its text encoder, at random weights: the first of a run from scratch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_model(spec | {"text_encoder": "", "questions": {}}, None, pretrained=False)[0].eval()


def load_model(run_dir):
    """(model, tokenizer, transform) of a finished run, on the CPU, in eval mode, offline; tokenizer None without texts.

    model(transform(image)[None])[0] and model(tokens=tokenizer(["a caption"]))[1] are embeddings (1, D) of one space.
    They are not of unit length: `normalize` them, and their products are cosines.
    Raises: UserError when the folder holds no model, or another than model.json says."""
    from safetensors.torch import load_file
    run_dir, tokenizer = Path(run_dir), None
    spec = read_json(run_dir / "model.json")
    with opening(run_dir):
        if spec["text_encoder"]:
            tokenizer = Tokenizer(run_dir / "tokenizer", spec["text_length"], spec["clean_captions"])
        model, transform = build_model(spec, tokenizer, pretrained=False)
        model.load_state_dict(load_file(run_dir / "model.safetensors"))
    return model.eval(), tokenizer, transform
