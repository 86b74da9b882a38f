"""Frozen models whose similarities set temperatures (TeMo, App. F)."""

import functools

import torch
import torch.nn.functional as F

from encoders.base import STATS
from encoders.hub import hub_encoder
from encoders.tokenizers import build_tokenizer
from evaluation.metrics import normalize


class Expert:
    """A frozen model whose similarities stand in for the encoders' own: (B, ...) inputs -> (B, width) unit features.

    image: transformers id or folder, mean of the patch features (DINOv2), of a clip over its frames; text: mean over
    the tokens. precision: bf16 or fp16 has an effect on a card alone."""

    def __init__(self, name, kind, transform, device, precision="no"):
        self.kind, self.transform, self.device = kind, transform, device
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision) if device.type == "cuda" else None
        self.autocast = functools.partial(torch.autocast, device.type, half, enabled=half is not None)
        self.model, _, _, self.config = hub_encoder(name, "vision" if kind == "image" else "text", True, None)
        self.model = self.model.to(device).eval().requires_grad_(False)
        self.tokenizer = build_tokenizer(name, 128) if kind == "text" else None

    @torch.no_grad()
    def __call__(self, inputs, batch=256):
        with self.autocast():
            features = torch.cat([self._features(inputs[i:i + batch]) for i in range(0, len(inputs), batch)])
        return normalize(features)

    def _features(self, inputs):
        if self.kind == "text":
            tokens = {k: v.to(self.device) for k, v in self.tokenizer(inputs).items()}
            keep = tokens["attention_mask"][..., None].float()  # (b, L, 1)
            return (self.model(**tokens).last_hidden_state * keep).sum(1) / keep.sum(1)
        own = self.transform.mean, self.transform.std
        mean, std = (torch.tensor(v, device=self.device)[:, None, None] for v in own)  # (3, 1, 1)
        side = self.config.get("image_size") or 224
        side = side if side <= 256 else 224
        frames = inputs.flatten(0, 1) if inputs.ndim == 5 else inputs  # (b, 3, S, S) or (b * T, 3, S, S)
        pixels = F.interpolate(frames * std + mean, size=(side, side), mode="bilinear", antialias=True)
        mean, std = (torch.tensor(v, device=self.device)[:, None, None] for v in STATS["imagenet"])
        tokens = self.model(pixel_values=(pixels - mean) / std).last_hidden_state  # (b, 1 + patches, width)
        features = tokens[:, 1:].mean(1)  # without the class token
        return features.unflatten(0, (len(inputs), -1)).mean(1) if inputs.ndim == 5 else features  # (b, width)
