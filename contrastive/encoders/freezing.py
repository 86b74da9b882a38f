"""What of the encoders is frozen, and their dropout."""

from contrastive.core.processes import UserError, opening

import torch
import torch.nn as nn


def freeze_unused(model, tokenizer, spec):
    """Freezes what gets no gradient (a mask token, a pooler): DDP would wait for it.

    Args:
        model: TwoTower, which encodes one example to find out.
        tokenizer: of its text encoder, or None.
        spec: the content of model.json.

    Raises:
        UserError: if the encoders cannot read the example, or their texts are all alike.
    """
    shape = spec.get("features") or (3, spec["image_size"], spec["image_size"])
    if spec.get("frames"):
        shape = (spec["frames"], *shape)
    inputs = [torch.zeros(1, *shape), None]
    place = f"{spec['image_encoder']} at --image-size {spec['image_size']}"
    if spec["text_encoder"]:
        place += f", {spec['text_encoder']}"
    model.eval()
    with opening(place), torch.enable_grad():
        if tokenizer:
            inputs[1] = tokenizer(["a"])
        if spec.get("questions"):
            inputs.append(inputs[1])
        if spec.get("modalities"):
            inputs = model.example(*inputs)
        outputs = [x for x in model(*inputs) if x is not None]           # (1, D) each
        sum(x.sum() for x in outputs).backward()
        if tokenizer:
            check_pooling(model.text, tokenizer)
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.requires_grad_(False)
    model.zero_grad(set_to_none=True)
    model.train()


@torch.no_grad()
def check_pooling(text, tokenizer):
    """Refuses --text-pooling cls of a causal decoder: its first token sees no other, so all texts
    with one first token would have one embedding.

    Args:
        text: TextEncoder, in eval mode.
        tokenizer: of it.
    """
    if text.pooling != "cls" or text.is_clip or not text.model_type:
        return
    ids = tokenizer(["a"])["input_ids"]
    ids = torch.cat([ids, ids], 1)                                       # (1, L)
    other_ids = ids.clone()
    other_ids[:, -1] = (ids[:, -1] + 1) % len(tokenizer.tokenizer)
    states, _ = text.states(ids, torch.ones_like(ids))                   # (1, L, width)
    other_states, _ = text.states(other_ids, torch.ones_like(ids))
    if torch.equal(states[:, 0], other_states[:, 0]):
        raise UserError(f"--text-pooling cls: the first token of {text.name} sees no other token, "
                        "so its embedding says nothing of the text; give --text-pooling mean")


def freeze_bodies(model, choice):
    """Freezes the bodies of encoders, whose projections learn (--freeze image, text, both)."""
    if choice in ("image", "both"):
        model.vision.freeze()
    if choice in ("text", "both") and model.text is not None:
        model.text.freeze()


def freeze_as_clip4clip(model):
    """Freezes what CLIP4Clip's own setting (--freeze_layer_num 0) freezes of a CLIP's two encoders.

    These are the embeddings of patches, class, tokens and positions, and the norm before the first
    layer.

    Raises:
        UserError: for other encoders.
    """
    if not model.vision.is_clip or not model.text.is_clip:
        raise UserError("--freeze clip4clip: both encoders have to be CLIP's; "
                        "use --freeze none for others")
    for name, parameter in model.named_parameters():
        if ".embeddings." in name or ".pre_layrnorm." in name:
            parameter.requires_grad_(False)


def set_drop_path(model, probability):
    """Drops residual branches of timm's encoders in training (stochastic depth).

    The last branch is dropped with this probability, earlier ones in proportion to their depth.
    Raises: UserError if no encoder has such branches.
    """
    from timm.layers import DropPath

    branches = []
    for module in model.modules():
        for name in ("drop_path", "drop_path1", "drop_path2"):
            if isinstance(getattr(module, name, None), nn.Module):
                branches.append((module, name))
    if not branches:
        raise UserError(f"--drop-path {probability}: the image encoder has no residual branches "
                        "that timm could drop; give a ViT of timm, or leave out the flag")
    blocks = list(dict.fromkeys(module for module, _ in branches))
    for module, name in branches:
        depth = blocks.index(module) / max(1, len(blocks) - 1)             # 0..1
        setattr(module, name, DropPath(probability * depth))


def change_dropout(module, dropout):
    """Sets every dropout probability of a module, without those of its children.

    T5's attention has a number under some name with `dropout` in it, others an nn.Dropout.
    """
    for name, value in vars(module).items():
        is_dropout = "dropout" in name
        if isinstance(module, nn.Dropout) and name == "p":
            is_dropout = True
        if is_dropout and isinstance(value, float):
            setattr(module, name, dropout)
