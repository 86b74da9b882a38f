"""Frozen models: experts whose similarities set temperatures (TeMo, App. F), and captioners for tools/caption.py."""

import functools

from contrastive.encoders.models import EvalTransform, TextEncoder, VisionEncoder, colours
from contrastive.encoders.texts import build_tokenizer
from contrastive.engine.processes import UserError, opening
from contrastive.evaluation.metrics import normalize

import torch
import torch.nn.functional as F

TEMPLATES = {"llava": "USER: <image>\n{} ASSISTANT:", "blip-2": "Question: {} Answer:"}  # without a chat template


class Expert:
    """A frozen model whose similarities set temperatures: (B, ...) inputs -> (B, width) unit features.

    name: a transformers id or folder. kind: 'image', of a DINO the class token ('cls') or the mean of the patches
    (pooling 'patches'), and the mean over a clip's frames; or 'text', the mean over the tokens. precision: bf16 and
    fp16 have an effect only on a card."""

    def __init__(self, name, kind, transform, device, precision="no", pooling="cls"):
        self.kind, self.transform, self.device, self.pooling = kind, transform, device, pooling
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision) if device.type == "cuda" else None
        self.autocast = functools.partial(torch.autocast, device.type, half, enabled=half is not None)
        self.tokenizer = build_tokenizer(name, 128) if kind == "text" else None
        encoder = TextEncoder(name, 0, pooling="mean") if kind == "text" else VisionEncoder(name, 0)
        self.encoder = encoder.to(device).eval().requires_grad_(False)
        if kind == "image" and not (self.encoder.config or {}).get("model_type", "").startswith("dino"):
            raise UserError(f"--image-expert {name}: no DINO, whose tokens are a class token and patches")

    @torch.no_grad()
    def __call__(self, inputs, batch=256):
        with self.autocast():
            features = torch.cat([self._features(inputs[i:i + batch]) for i in range(0, len(inputs), batch)])
        return normalize(features)

    def _features(self, inputs):
        if self.kind == "text":
            return self.encoder(**{k: v.to(self.device) for k, v in self.tokenizer(inputs).items()})
        mean, std = (colours(v, self.device) for v in (self.transform.mean, self.transform.std))  # (3, 1, 1)
        frames = inputs.flatten(0, 1) if inputs.ndim == 5 else inputs  # (b, 3, S, S) or (b * T, 3, S, S)
        side = min(224, self.encoder.config["image_size"])  # other positions are interpolated
        pixels = F.interpolate(frames * std + mean, size=(side, side), mode="bilinear", antialias=True)
        mean, std = (colours(v, self.device) for v in self.encoder.stats)
        tokens = self.encoder.body(pixel_values=(pixels - mean) / std).last_hidden_state  # class, registers, patches
        patches = tokens[:, 1 + self.encoder.config.get("num_register_tokens", 0):]
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


def language_model(name, args, sees=False):
    """A function (prompts, pictures) -> one text each, on one line, by a transformers model; sees: with a picture a
    prompt, else it is a decoder or an encoder-decoder of texts. Raises: UserError."""
    import transformers as T
    load = {"trust_remote_code": False}
    with opening(name):
        processor = (T.AutoProcessor if sees else T.AutoTokenizer).from_pretrained(name, **load)
        encodes = T.AutoConfig.from_pretrained(name, **load).is_encoder_decoder
        of_texts = T.AutoModelForSeq2SeqLM if encodes else T.AutoModelForCausalLM
        kind = T.AutoModelForImageTextToText if sees else of_texts
        model = kind.from_pretrained(name, dtype=args.dtype, **load).to(args.device).eval()
    tokenizer = processor.tokenizer if sees else processor
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    template = TEMPLATES.get(model.config.model_type, "{}")
    how = {"do_sample": True, "temperature": args.temperature} if args.temperature else {
        "do_sample": False, "num_beams": 1}

    def asked(prompt):
        if not processor.chat_template:
            return template.format(prompt)
        content = [{"type": "image"}, {"type": "text", "text": prompt}] if sees else prompt
        chat = [{"role": "user", "content": content}]
        return processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)

    @torch.inference_mode()
    def answers(prompts, pictures=()):
        texts = [asked(prompt) for prompt in prompts]
        if sees:
            inputs = processor(images=[[p] for p in pictures], text=texts, padding=True, return_tensors="pt")
            inputs = inputs.to(args.device, model.dtype)
        else:
            inputs = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False).to(args.device)
        out = model.generate(**inputs, max_new_tokens=args.max_new_tokens, **how)  # (B, length)
        prompt = inputs["input_ids"]  # (B, L); a decoder repeats it, an encoder-decoder does not
        if out.shape[1] >= prompt.shape[1] and torch.equal(out[:, :prompt.shape[1]], prompt):
            out = out[:, prompt.shape[1]:]
        return [" ".join(text.split()) for text in tokenizer.batch_decode(out, skip_special_tokens=True)]
    return answers
