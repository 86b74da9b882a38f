"""Experts: frozen models whose similarities set temperatures (TeMo, App. F)."""

import functools

from contrastive.core.metrics import normalize
from contrastive.core.processes import UserError
from contrastive.encoders.texts import MAX_LENGTH, build_tokenizer
from contrastive.encoders.towers import TextEncoder, VisionEncoder
from contrastive.encoders.transform import EvalTransform, channel_values

import torch
import torch.nn.functional as F

EXPERT_SIZE = 224  # largest side of an image that an expert reads, in pixels
HALF_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Expert:
    """A frozen model whose similarities set temperatures: B inputs -> (B, width) unit features.

    An image expert is a DINO and reads normalised images (B, 3, S, S), or clips (B, T, 3, S, S), of
    whose frames it takes the mean; a text expert reads texts and takes the mean over their tokens.

    Args:
        name: a transformers id or folder.
        modality: "image" or "text".
        transform: EvalTransform, whose statistics have normalised the images.
        device: of the model.
        precision: "no", "bf16" or "fp16", the latter two only on a GPU.
        pooling: "cls", an image's class token, or "patches", the mean of its patches.
    """

    def __init__(self, name, modality, transform, device, *, precision="no", pooling="cls"):
        self.modality = modality
        self.transform = transform
        self.device = device
        self.pooling = pooling
        dtype = None
        if device.type == "cuda":
            dtype = HALF_PRECISION.get(precision)
        self.autocast = functools.partial(
            torch.autocast, device.type, dtype, enabled=dtype is not None)
        if modality == "text":
            self.tokenizer = build_tokenizer(name, MAX_LENGTH)
            encoder = TextEncoder(name, 0, pooling="mean")
        elif modality == "image":
            encoder = VisionEncoder(name, 0)
            if not encoder.model_type.startswith("dino"):
                raise UserError(
                    f"--image-expert {name}: its type is {encoder.model_type}, not a DINO, whose "
                    "tokens are a class token and patches; give a DINOv2 or DINOv3")
        else:
            raise ValueError(f"modality is 'image' or 'text', not {modality!r}")
        self.encoder = encoder.to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, inputs, batch=256):
        """Inputs (B, ...), or B texts -> (B, width), unit length, `batch` at a time. Of clips with
        sound or subtitles it reads the frames."""
        if isinstance(inputs, dict):
            inputs = inputs["frames"]
        starts = range(0, len(inputs), batch)
        with self.autocast():
            features = torch.cat([self.encode(inputs[i:i + batch]) for i in starts])
        return normalize(features)

    def encode(self, inputs):
        """b inputs -> (b, width), not normalised."""
        if self.modality == "text":
            tokens = self.tokenizer(inputs)
            tokens = {name: ids.to(self.device) for name, ids in tokens.items()}
            return self.encoder(**tokens)
        if inputs.ndim == 4:
            return self.encode_images(inputs)
        features = self.encode_images(inputs.flatten(0, 1))              # (b * T, width)
        return features.unflatten(0, (len(inputs), -1)).mean(1)          # (b, width)

    def encode_images(self, images):
        """(n, 3, S, S), normalised by the transform's statistics -> (n, width)."""
        config = self.encoder.config
        # at most its own size; DINOv2 (518) interpolates its positions to 224
        side = min(EXPERT_SIZE, config["image_size"])
        mean = channel_values(self.transform.mean, self.device)          # (3, 1, 1)
        std = channel_values(self.transform.std, self.device)
        pixels = F.interpolate(
            images * std + mean, size=(side, side), mode="bilinear", antialias=True)
        pixels = EvalTransform(side, *self.encoder.stats).normalise(pixels)
        tokens = self.encoder.body(pixel_values=pixels).last_hidden_state
        if self.pooling == "cls":
            return tokens[:, 0]
        num_registers = config.get("num_register_tokens", 0)             # after the class token
        return tokens[:, 1 + num_registers:].mean(1)
