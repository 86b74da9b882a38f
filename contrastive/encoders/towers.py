"""Image encoders by name, and what of an encoder is frozen or dropped out."""

import functools

from contrastive.data.hub import note_commit
from contrastive.encoders.base import STATS, Tower, hub_encoder, small_cnn
from contrastive.encoders.clip_vip import ClipViP
from contrastive.encoders.vast import vision_tower
from contrastive.core.files import read_json
from contrastive.core.processes import UserError, opening, print_main

import torch
import torch.nn as nn


def image_tower(name, kind, embed_dim, *, pretrained, image_size, config=None, num_features=0,
                num_frames=0):
    """The Tower of an image encoder.

    Args:
        name: as --image-encoder takes it.
        kind: its EncoderKind.
        embed_dim: D, which is the width of SSB's tower.
        pretrained: read published weights.
        image_size: pixels of a side.
        config: of a transformers model that is rebuilt, as a dict.
        num_features: width of precomputed features.
        num_frames: T, for a tower that is made for one number of frames.
    """
    library_name = name.removeprefix(kind.prefix)
    if kind.family == "small":
        return Tower(small_cnn().to(memory_format=torch.channels_last), 128)
    if kind.family == "ssb":
        from contrastive.encoders.ssb import VideoTower

        return Tower(VideoTower(num_features, embed_dim), embed_dim)
    if kind.family == "regions":
        return Tower(nn.Identity(), num_features)
    if kind.family == "vast":
        return vision_tower(name, pretrained, image_size)
    if kind.family == "video_swin":
        return video_swin(library_name, pretrained)
    if kind.family == "clip_vip":
        return clip_vip_tower(library_name, pretrained, config)
    if kind.family == "transformers":
        return transformers_tower(library_name, pretrained, config)
    if kind.family == "cifar_resnet":
        return cifar_resnet()
    if kind.family == "video_vit":
        return video_vit(library_name, pretrained, image_size, num_frames)
    if kind.family == "timm":
        return timm_encoder(library_name, pretrained, image_size)
    raise ValueError(f"no function builds encoders of the family {kind.family!r}")


# ===================================== transformers and torchvision ===============================
def transformers_tower(name, pretrained, config):
    """The Tower of a transformers model; of a CLIP its vision tower."""
    tower = hub_encoder(name, "vision", pretrained, config)
    stats = STATS["clip" if tower.model_type.startswith("clip") else "imagenet"]
    if not config:  # a model that is rebuilt has its statistics in model.json
        stats = hub_stats(name, stats)
    return tower._replace(stats=stats, frame_features=transformers_features)


def clip_vip_tower(name, pretrained, config):
    """The Tower of CLIP-ViP in place of a CLIP's vision tower."""
    tower = hub_encoder(name, "vision", pretrained, config)
    if tower.model_type != "clip":
        raise UserError(f"--image-encoder clip_vip:{name}: this is a model of the type "
                        f"{tower.model_type}; give a CLIP")
    return tower._replace(body=ClipViP(tower.body), stats=STATS["clip"])


def hub_stats(name, default):
    """Mean and standard deviation of a transformers model's pixels.

    Args:
        default: of a model none of whose files has them; it is printed.
    """
    processor = hub_json(name, "processor_config.json").get("image_processor")
    if not processor:  # as in transformers, which wrote the other file before its version 5
        processor = hub_json(name, "preprocessor_config.json")
    mean = processor.get("image_mean") or default[0]
    std = processor.get("image_std") or default[1]
    if not processor.get("image_mean") or not processor.get("image_std"):
        print_main(f"WARNING: {name}: no file that can be read says the statistics of its pixels; "
                   f"--image-stats encoder takes mean {tuple(mean)}, deviation {tuple(std)}")
    return tuple(mean), tuple(std)


def hub_json(name, file_name):
    """The content of a JSON file of a transformers model; {} if it has no such file."""
    from transformers.utils import cached_file

    with opening(name):
        path = cached_file(name, file_name, _raise_exceptions_for_missing_entries=False)
    if not path:
        return {}
    return read_json(path)


def transformers_features(encoder, pixels):
    """Features (B * T, width) of a transformers model.

    They are its pooled ones, or its class token if its pooler has a layer of its own, which many
    published weights lack (ViT, DeiT).
    """
    frames = pixels.flatten(0, -4)                                       # (B * T, 3, S, S)
    output = encoder.body(pixel_values=frames)
    if hasattr(getattr(encoder.body, "pooler", None), "dense"):
        return output.last_hidden_state[:, 0]
    return output.pooler_output.flatten(1)                               # a ResNet's has 4 axes


def video_swin(name, pretrained):
    """The Tower of torchvision's Video Swin without its classifier, with weights of Kinetics-400.

    Its body turns clips (B, 3, T, S, S) into (B, width * T / 2).
    """
    from torchvision.models import get_model

    with opening(name):
        body = get_model(name, weights="KINETICS400_V1" if pretrained else None)
    width = body.head.in_features
    body.head = nn.Identity()
    body.avgpool = nn.AdaptiveAvgPool3d((None, 1, 1))
    return Tower(body, width, stats=STATS["imagenet"], frame_features=swin_features)


def swin_features(encoder, pixels):
    """Features (B * T / 2, width) of Video Swin, which sees the whole clip and halves its steps."""
    clips = pixels if pixels.ndim == 5 else pixels[:, None]              # (B, T, 3, S, S)
    features = encoder.body(clips.transpose(1, 2))                       # (B, width * T / 2)
    features = features.unflatten(1, (encoder.width, -1))                # (B, width, T / 2)
    return features.transpose(1, 2).flatten(0, 1)


# ================================================ timm ============================================
def timm_encoder(name, pretrained, image_size):
    """The Tower of a timm model without its classifier."""
    import timm

    create = functools.partial(timm.create_model, name, pretrained=pretrained, num_classes=0)
    with opening(name):
        # A transformer has to know the size; other models do not take this argument.
        try:
            body = create(img_size=image_size)
        except TypeError:
            body = create()
    cfg = body.pretrained_cfg
    if pretrained:
        note_commit(cfg.get("hf_hub_id") or "")
    width = getattr(body, "head_hidden_size", 0) or body.num_features
    return Tower(body, width, stats=(cfg["mean"], cfg["std"]))


def cifar_resnet():
    """The Tower of a ResNet-18 for images of 32 pixels: a 3x3 stem and no max-pooling."""
    import timm

    body = timm.create_model("resnet18", pretrained=False, num_classes=0)
    body.conv1 = nn.Conv2d(3, 64, 3, stride=1, padding=1, bias=False)
    body.maxpool = nn.Identity()
    return Tower(body, body.num_features, stats=STATS["imagenet"])


def video_vit(name, pretrained, image_size, num_frames):
    """The Tower of a timm ViT that reads all frames of a clip."""
    tower = timm_encoder(name, pretrained, image_size)
    with opening(f"video_{name}"):  # any other model of timm lacks what VideoViT uses
        return tower._replace(body=VideoViT(tower.body, num_frames))


class VideoViT(nn.Module):
    """A timm ViT over the patches of all frames at once, after AVION.

    Each patch gets the embedding of its position, as in an image, and of its frame (`temporal`,
    zeros at the start). One class token attends to all T * P patches in every layer and is the
    feature of the clip. Differences from AVION: there is no patch dropout, and positions have
    weight decay like other matrices. A difference from timm: LayerNorms have AVION's epsilon, 1e-6,
    with all weights, also with published ones of CLIP, whose own is 1e-5.

    Args:
        vit: the ViT, whose weights are used in place.
        frames: T, number of frames of every clip.
    """

    def __init__(self, vit, frames):
        super().__init__()
        self.vit = vit
        self.temporal = nn.Parameter(torch.zeros(frames, vit.embed_dim))  # (T, width)
        for module in vit.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = 1e-6

    def forward(self, clips):
        """Clips (B, T, 3, S, S) -> the class token, (B, width)."""
        if clips.ndim != 5 or clips.shape[1] != len(self.temporal):
            raise UserError(f"--image-encoder video_...: made for clips of {len(self.temporal)} "
                            f"frames, the pixels have the shape {tuple(clips.shape)}")
        vit = self.vit
        x = vit.patch_embed(clips.flatten(0, 1))                         # (B * T, P, width)
        x = x.unflatten(0, clips.shape[:2])                              # (B, T, P, width)
        class_position = vit.pos_embed[0, :1]                            # (1, width)
        patch_position = vit.pos_embed[0, 1:]                            # (P, width)
        x = x + patch_position + self.temporal[:, None]
        x = x.flatten(1, 2)                                              # (B, T * P, width)
        token = (vit.cls_token + class_position).expand(len(x), -1, -1)  # (B, 1, width)
        x = vit.norm_pre(torch.cat([token, x], 1))                       # (B, 1 + T * P, width)
        return vit.norm(vit.blocks(x)[:, 0])


# ======================================== freezing and dropout ====================================
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
    """Freezes the bodies of encoders, whose projections learn (--freeze image, text, both).

    Raises:
        UserError: for a model of which more than the two bodies and projections reads them.
    """
    if choice not in ("image", "text", "both"):
        return
    reads_words = hasattr(model, "answers") or getattr(model.text, "head", None) is not None
    kind = model.vision.kind
    if reads_words or kind.reads_files or kind.family == "vast":
        raise UserError(f"--freeze {choice}: not with questions, SSB, VGT or VAST, which have no "
                        "projection of each encoder's features; use --freeze none")
    if choice in ("image", "both"):
        model.vision.freeze()
    if choice in ("text", "both") and model.text is not None:
        model.text.freeze()


def freeze_as_clip4clip(model):
    """Freezes what CLIP4Clip's own setting (--freeze_layer_num 0) freezes of two CLIP towers.

    These are the embeddings of patches, class, tokens and positions, and the norm before the first
    layer.

    Raises:
        UserError: for other towers.
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
