"""Frozen models: experts whose similarities set temperatures (TeMo, App. F), and captioners for tools/caption.py."""

import functools
import math

from contrastive.encoders.base import STATS, hub_encoder, masked_mean
from contrastive.encoders.models import EvalTransform, VisionEncoder, colours
from contrastive.encoders.texts import build_tokenizer
from contrastive.encoders.towers import hub_stats
from contrastive.engine.processes import UserError, opening
from contrastive.evaluation.metrics import normalize

import torch
import torch.nn.functional as F

TEMPLATES = {"llava": "USER: <image>\n{} ASSISTANT:", "blip-2": "Question: {} Answer:"}  # without a chat template


class Expert:
    """A frozen model whose similarities set temperatures: (B, ...) inputs -> (B, width) unit features.

    name: a transformers id or folder. kind: 'image', the class token ('cls') or the mean of the patch features (pooling
    'patches'), and the mean over a clip's frames; or 'text', the mean over the tokens. precision: bf16 and fp16 have an
    effect only on a card."""

    def __init__(self, name, kind, transform, device, precision="no", pooling="cls"):
        self.kind, self.transform, self.device, self.pooling = kind, transform, device, pooling
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision) if device.type == "cuda" else None
        self.autocast = functools.partial(torch.autocast, device.type, half, enabled=half is not None)
        tower = hub_encoder(name, "vision" if kind == "image" else "text", True, None)
        self.model, self.config = tower.body.to(device).eval().requires_grad_(False), tower.config
        self.tokenizer = build_tokenizer(name, 128) if kind == "text" else None
        side = self.config.get("image_size") or self.config.get("vision_config", {}).get("image_size") or 224
        family = self.config.get("model_type", "")
        fixed = not family.startswith("dino")  # DINO's positions are interpolated
        self.size = (side, side) if fixed or side <= 256 else (224, 224)
        self.stats = hub_stats(name, STATS["clip" if family.startswith("clip") else "imagenet"])
        with opening(name):
            self(["a"] if kind == "text" else torch.zeros(1, 3, side, side, device=device))

    @torch.no_grad()
    def __call__(self, inputs, batch=256):
        with self.autocast():
            features = torch.cat([self._features(inputs[i:i + batch]) for i in range(0, len(inputs), batch)])
        return normalize(features)

    def _features(self, inputs):
        if self.kind == "text":
            tokens = {k: v.to(self.device) for k, v in self.tokenizer(inputs).items()}
            return masked_mean(self.model(**tokens).last_hidden_state, tokens["attention_mask"])
        mean, std = (colours(v, self.device) for v in (self.transform.mean, self.transform.std))  # (3, 1, 1)
        frames = inputs.flatten(0, 1) if inputs.ndim == 5 else inputs  # (b, 3, S, S) or (b * T, 3, S, S)
        pixels = F.interpolate(frames * std + mean, size=self.size, mode="bilinear", antialias=True)
        mean, std = (colours(v, self.device) for v in self.stats)
        tokens = self.model(pixel_values=(pixels - mean) / std).last_hidden_state  # (b, 1 + registers + patches, width)
        patches = tokens[:, 1 + (self.config.get("num_register_tokens") or 0):]
        if math.isqrt(patches.shape[1]) ** 2 != patches.shape[1]:  # SigLIP, Swin: the first would be a patch
            raise ValueError(f"its {tokens.shape[1]} tokens are not a class token and a square of patches")
        features = tokens[:, 0] if self.pooling == "cls" else patches.mean(1)  # (b, width) or (b * T, width)
        return features.unflatten(0, (len(inputs), -1)).mean(1) if inputs.ndim == 5 else features  # (b, width)


def frame_features(name, device):
    """A function frames (T, 3, H, W) uint8 -> (T, D) features. 'colour': mean colours on a 4 x 4 grid, without a model;
    else unit features of a timm or transformers model. Raises: UserError."""
    if name == "colour":
        return lambda frames: F.adaptive_avg_pool2d(frames.float() / 255, 4).flatten(1) / 48**0.5  # (T, 48)
    if name in ("small", "resnet18-cifar"):
        raise UserError(f"--frame-encoder {name} has no learned weights")
    encoder = VisionEncoder(name, 0).to(device).eval()
    side = (encoder.config or {}).get("vision_config", {}).get("image_size", 224)  # a CLIP takes no other size
    view = EvalTransform(side, *encoder.stats, resize="squash")

    @torch.inference_mode()
    def features(frames):
        pixels = view.normalise(view.raw(frames).to(device).float() / 255)  # (T, 3, side, side)
        return normalize(encoder(pixels)[0])  # (T, D)
    return features


def vision_language_model(args, device):
    """A function (pictures, prompt) -> one text each, by an image-text-to-text model. Raises: UserError."""
    from transformers import AutoModelForImageTextToText, AutoProcessor
    with opening(args.model):
        processor = AutoProcessor.from_pretrained(args.model, trust_remote_code=False)
        processor.tokenizer.padding_side = "left"
        model = AutoModelForImageTextToText.from_pretrained(args.model, dtype=args.dtype, trust_remote_code=False)
    model = model.to(device).eval()
    template = TEMPLATES.get(model.config.model_type, "{}")

    def answers(pictures, prompt):
        content = [{"type": "image"}, {"type": "text", "text": prompt}]
        text = (processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
                if processor.chat_template else template.format(prompt))
        inputs = processor(images=[[p] for p in pictures], text=[text] * len(pictures), padding=True,
                           return_tensors="pt")
        return _generate(model, inputs.to(device, model.dtype), processor.tokenizer, args)
    return answers


def summary_model(args, device):
    """A function texts -> one text each, by a decoder or encoder-decoder language model. Raises: UserError."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
    load = {"trust_remote_code": False}
    with opening(args.summary_model):
        config = AutoConfig.from_pretrained(args.summary_model, **load)
        tokenizer = AutoTokenizer.from_pretrained(args.summary_model, padding_side="left", **load)
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = auto.from_pretrained(args.summary_model, dtype=args.dtype, **load).to(device).eval()
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    def answers(texts):
        if tokenizer.chat_template:
            texts = [tokenizer.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True,
                                                   tokenize=False) for t in texts]
        inputs = tokenizer(texts, padding=True, return_tensors="pt").to(device)
        inputs.pop("token_type_ids", None)
        return _generate(model, inputs, tokenizer, args)
    return answers


@torch.inference_mode()
def _generate(model, inputs, tokenizer, args):
    """The text that the model generates after each prompt, as one line."""
    how = {"do_sample": True, "temperature": args.temperature} if args.temperature else {
        "do_sample": False, "num_beams": 1}
    out = model.generate(**inputs, max_new_tokens=args.max_new_tokens, **how)  # (B, length)
    prompt = inputs["input_ids"]  # (B, L); a decoder repeats it, an encoder-decoder does not
    if out.shape[1] >= prompt.shape[1] and torch.equal(out[:, :prompt.shape[1]], prompt):
        out = out[:, prompt.shape[1]:]
    return [" ".join(text.split()) for text in tokenizer.batch_decode(out, skip_special_tokens=True)]
