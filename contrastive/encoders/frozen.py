"""Frozen models: experts whose similarities set temperatures (TeMo, App. F), features of frames and
language models for tools/."""

import functools

from contrastive.encoders.kinds import encoder_kind
from contrastive.encoders.models import (
    EvalTransform, TextEncoder, VisionEncoder, channel_values)
from contrastive.encoders.texts import MAX_LENGTH, build_tokenizer
from contrastive.core.processes import UserError, opening
from contrastive.core.metrics import normalize

import torch
import torch.nn.functional as F

EXPERT_SIZE = 224      # most pixels of a side of what an image expert reads
HALF_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Prompts of models without a chat template, by their type.
TEMPLATES = {"llava": "USER: <image>\n{} ASSISTANT:", "blip-2": "Question: {} Answer:"}


# =============================================== experts ==========================================
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
        dtype = HALF_PRECISION.get(precision) if device.type == "cuda" else None
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


# ========================================== features of frames ====================================
def frame_features(name, device):
    """A function from frames (T, 3, H, W) uint8 to features (T, D), which finds alike frames.

    Args:
        name: "colour", mean colours on a 4 x 4 grid, without a model; else a timm or transformers
            model, whose features have unit length.

    Raises:
        UserError: for a name without published weights.
    """
    if name == "colour":
        return colour_features
    if not encoder_kind(name).has_published_weights:
        raise UserError(f"--frame-encoder {name}: has no published weights; give colour, or a "
                        "model of timm or transformers")
    encoder = VisionEncoder(name, 0).to(device).eval()
    config = encoder.config or {}
    side = config.get("vision_config", {}).get("image_size", 224)  # a CLIP takes no other size
    view = EvalTransform(side, *encoder.stats, resize="squash")

    @torch.inference_mode()
    def unit_features(frames):
        pixels = view.raw(frames).to(device).float() / 255
        features, _ = encoder(view.normalise(pixels))                    # (T, D)
        return normalize(features)

    return unit_features


def colour_features(frames):
    """Mean colours (T, 48) of frames (T, 3, H, W) uint8 on a 4 x 4 grid."""
    grid = F.adaptive_avg_pool2d(frames.float() / 255, 4)                # (T, 3, 4, 4)
    return grid.flatten(1) / 48**0.5


# ============================================ language models =====================================
def language_model(name, args, sees=False):
    """A function from prompts, and one picture for each if it sees, to texts of one line.

    Args:
        name: a transformers id or folder.
        args: dtype, device, max_new_tokens and temperature (0 = the likeliest token).
        sees: it reads pictures; else it is a decoder or an encoder-decoder of texts.

    Raises:
        UserError: if it cannot be loaded.
    """
    processor, model = load_language_model(name, args, sees)
    tokenizer = processor.tokenizer if sees else processor
    if not model.config.is_encoder_decoder:  # an encoder would give texts other positions
        tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    options = {"do_sample": False, "num_beams": 1}
    if args.temperature:
        options = {"do_sample": True, "temperature": args.temperature}

    @torch.inference_mode()
    def answer(prompts, pictures=()):
        texts = [fill_template(prompt, processor, model, sees) for prompt in prompts]
        token_options = {"padding": True, "return_tensors": "pt"}
        if tokenizer.bos_token and texts[0].startswith(tokenizer.bos_token):
            token_options["add_special_tokens"] = False  # the chat template has written them
        if sees:
            images = [[picture] for picture in pictures]
            inputs = processor(images=images, text=texts, **token_options)
            inputs = inputs.to(args.device, model.dtype)
        else:
            inputs = tokenizer(texts, return_token_type_ids=False, **token_options)
            inputs = inputs.to(args.device)
        outputs = model.generate(**inputs, max_new_tokens=args.max_new_tokens, **options)
        prompt_ids = inputs["input_ids"]                                 # (B, L)
        length = prompt_ids.shape[1]
        # A decoder repeats the prompt, an encoder-decoder does not.
        if outputs.shape[1] >= length and torch.equal(outputs[:, :length], prompt_ids):
            outputs = outputs[:, length:]
        answers = tokenizer.batch_decode(outputs, skip_special_tokens=True)
        return [" ".join(text.split()) for text in answers]

    return answer


def load_language_model(name, args, sees):
    """The processor (without pictures a tokenizer) and the model of language_model."""
    import transformers

    options = {"trust_remote_code": False}
    with opening(name):
        config = transformers.AutoConfig.from_pretrained(name, **options)
        processor_class = transformers.AutoTokenizer
        if sees:
            processor_class = transformers.AutoProcessor
            model_class = transformers.AutoModelForImageTextToText
        elif config.is_encoder_decoder:
            model_class = transformers.AutoModelForSeq2SeqLM
        else:
            model_class = transformers.AutoModelForCausalLM
        processor = processor_class.from_pretrained(name, **options)
        model = model_class.from_pretrained(name, dtype=args.dtype, **options)
    return processor, model.to(args.device).eval()


def fill_template(prompt, processor, model, sees):
    """The text that a language model reads for a prompt."""
    if not processor.chat_template:
        return TEMPLATES.get(model.config.model_type, "{}").format(prompt)
    content = prompt
    if sees:
        content = [{"type": "image"}, {"type": "text", "text": prompt}]
    chat = [{"role": "user", "content": content}]
    return processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
