"""Encoders of transformers, by id or folder."""

from engine.base import UserError, hub_reason

import torch


def hub_encoder(name, tower, pretrained, config):
    """A transformers model, its width, its CLIP projection (or None) and its config as a dict."""
    import transformers
    try:
        if config is None:
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        else:
            config = transformers.AutoConfig.for_model(**config)
        if config.model_type == "clip":
            kind = transformers.CLIPModel
            whole = kind.from_pretrained(name, dtype=torch.float32) if pretrained else kind(config)  # its own class
            body = whole.vision_model if tower == "vision" else whole.text_model
            projection = whole.visual_projection if tower == "vision" else whole.text_projection
            return body, body.config.hidden_size, projection, config.to_dict()
        encoder_alone = tower == "text" and config.model_type == "t5"
        auto = transformers.AutoModelForTextEncoding if encoder_alone else transformers.AutoModel
        if pretrained:
            body = auto.from_pretrained(name, dtype=torch.float32, trust_remote_code=False)
        else:
            body = auto.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"--{'image' if tower == 'vision' else 'text'}-encoder {name}: {hub_reason(error)}") from error
    known = config.to_dict()
    width = known.get("hidden_size") or (known.get("hidden_sizes") or [0])[-1] or known.get("d_model") or 0
    return body, width or getattr(config, "hidden_size", 0), None, known


def read_hub(encoder, pixels):
    """Pooled features of a transformers model, else its class token: (B * T, width)."""
    frames = pixels.flatten(0, 1) if pixels.ndim == 5 else pixels  # (B * T, 3, S, S)
    found = encoder.body(pixel_values=frames)
    pooled = getattr(found, "pooler_output", None)
    return found.last_hidden_state[:, 0] if pooled is None else pooled


def read_words(encoder, input_ids, attention_mask):
    """Hidden states of the tokens, (B, L, width), and of the text, (B, width): CLIP's own, the first, or the mean."""
    found = encoder.body(input_ids=input_ids, attention_mask=attention_mask)
    words = found.last_hidden_state
    if encoder.config["model_type"].startswith("clip"):
        return words, found.pooler_output
    if encoder.pooling == "mean":
        keep = attention_mask[..., None].to(words.dtype)  # (B, L, 1)
        return words, (words * keep).sum(1) / keep.sum(1)
    return words, words[:, 0]
