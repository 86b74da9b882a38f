"""The parts of encoders: pixel statistics, the small towers, a tower and a pair of them, transformers by id."""

import contextlib
import functools
import typing
from pathlib import Path

from contrastive.data.table import note_commit
from contrastive.engine.processes import UserError, opening, say, world

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import forward_ad

STATS = {  # mean and standard deviation of the pixels, named after the weights or code that use them
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5,) * 3, (0.5,) * 3),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))}
FROM_FILES = ("ssb", "regions")  # SSB's tower and VGT's read features of a clip, no pixels
VIDEO = "video_"  # prefix of a timm ViT's name: one transformer over the patches of all frames
CLIP_VIP = "clip_vip:"  # prefix of a CLIP's transformers id or folder: the same with proxy tokens, encoders/clip_vip.py
FULL = {"dtype": torch.float32, "trust_remote_code": False}  # of transformers; some are saved in half precision


def batchnorms(model):
    """The layers that keep batch statistics."""
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def sync_batchnorm(model, args):
    """The model with SyncBatchNorm on several cards. Chunks are refused: their statistics would be their own."""
    if not batchnorms(model):
        return model
    if args.chunk_size:
        raise UserError(f"--chunk-size {args.chunk_size}: {args.image_encoder} has BatchNorm, whose statistics would "
                        "be those of a chunk; give --chunk-size 0, or an encoder without it")
    if world() > 1 and torch.cuda.is_available() and not args.cpu:
        from timm.layers import convert_sync_batchnorm  # torch's own loses the activations inside timm's norms
        return convert_sync_batchnorm(model)
    if world() > 1:
        say("BatchNorm on several CPU processes: statistics are per process, so the run differs from that of one")
    return model


def recompute(tower):
    """--grad-checkpointing: layers of timm's and transformers' encoders keep their inputs alone, and run again on the
    way back; says of which.   Raises: UserError if there is none."""
    found = []
    for encoder in filter(None, (tower.vision, tower.text)):
        for switch in ("set_grad_checkpointing", "activation_checkpointing_enable", "gradient_checkpointing_enable"):
            if hasattr(encoder.body, switch):  # timm's, transformers', and that of transformers before 5.22
                with opening(encoder.name):
                    getattr(encoder.body, switch)()
                found.append(encoder.name)
                break
    if not found:
        raise UserError("--grad-checkpointing: neither encoder is one of timm or transformers that offers it")
    say(f"--grad-checkpointing: of {', '.join(found)}")


def run_again(model):
    """The layers that `recompute` has changed, each with the attribute that says so."""
    return [(m, flag) for m in model.modules() for flag in ("grad_checkpointing", "gradient_checkpointing")
            if getattr(m, flag, False)]


def functional_call(model, tensors, inputs):
    """torch's, in which no layer runs again on the way back: it would find the model's own tensors, not these."""
    changed = run_again(model)
    for m, flag in changed:
        setattr(m, flag, False)
    try:
        return torch.func.functional_call(model, tensors, inputs)
    finally:
        for m, flag in changed:
            setattr(m, flag, True)


@contextlib.contextmanager
def statistics_stay(norms):
    """Inside, these BatchNorms leave their running statistics, which layers that run again would move twice."""
    kept = [(m.momentum, m.num_batches_tracked) for m in norms]
    for m in norms:
        m.momentum, m.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for m, (momentum, number) in zip(norms, kept):
            m.momentum, m.num_batches_tracked = momentum, number


class GroupNorm(nn.GroupNorm):
    """torch's, whose derivative in forward mode, that of mama.py, refuses channels-last images before torch 2.14."""
    REFUSES = torch.__version__ < "2.14"

    def forward(self, x):
        dual = self.REFUSES and forward_ad.unpack_dual(x).tangent is not None
        return super().forward(x.contiguous() if dual else x)


class _Block(nn.Module):
    """Two 3x3 convolutions with a skip; starts as the identity."""

    def __init__(self, width):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), GroupNorm(8, width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), GroupNorm(8, width)
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def masked_mean(x, keep):
    """Mean of x (..., L, width) over the places where keep (..., L) is 1 or True: (..., width)."""
    return (x * keep[..., None]).sum(-2) / keep.sum(-1, keepdim=True)


def small_cnn(width=32):
    """A four-stage residual network of about a million weights, GroupNorm only: (B, 3, S, S) -> (B, 4 * width)."""
    layers, channels = [], 3
    for stage in range(4):
        out = width // 2 if stage == 0 else width * 2 ** (stage - 1)
        layers += [nn.Conv2d(channels, out, 3, 2, 1, bias=False), GroupNorm(8, out), nn.ReLU()]
        layers += [_Block(out)] if stage else []
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Transformer(nn.ModuleList):
    """Pre-norm layers: x (B, L, width), keep (B, L) bool, True at a token -> (B, L, width).

    first: the last layer returns only so many of the first tokens, (B, first, width); 0 = all.
    dropout: of x, the attention and the MLP; 0 unless set_dropout sets it."""

    def __init__(self, width, layers, heads):
        super().__init__([nn.ModuleDict({
            "norm1": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width),
            "norm2": nn.LayerNorm(width), "fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)})
            for _ in range(layers)])
        self.heads, self.dropout = heads, 0.0

    def forward(self, x, keep, first=0):
        B, L = keep.shape
        drop = functools.partial(F.dropout, p=self.dropout, training=self.training)
        x = drop(x)
        for b in self:
            qkv = b["qkv"](b["norm1"](x)).view(B, L, 3, self.heads, -1)  # (B, L, 3, heads, width / heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, L, width / heads) each
            if first and b is self[-1]:
                q, x = q[:, :, :first], x[:, :first]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None])
            x = x + drop(b["out"](y.transpose(1, 2).flatten(2)))
            x = x + drop(b["fc2"](F.gelu(b["fc1"](b["norm2"](x)))))
        return x


class SmallText(nn.Module):
    """A transformer over WordPiece ids (B, L) -> hidden states of the tokens (B, L, width), their mean (B, width)."""

    def __init__(self, vocabulary, length, width=128):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width, padding_idx=0)
        self.position = nn.Parameter(torch.randn(length + 3, width) * 0.01)
        nn.init.normal_(self.token.weight, std=0.02)
        self.blocks = Transformer(width, layers=1, heads=4)
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids, attention_mask):
        keep = attention_mask.bool()  # (B, L)
        x = self.token(input_ids) + self.position[:keep.shape[1]]  # (B, L, width)
        x = self.norm(self.blocks(x, keep))
        return x, masked_mean(x, keep)


def channels_last(network):
    """Stores the kernels of a convolutional network, not a ViT's, in channels-last order, which is faster on GPUs."""
    if sum(isinstance(m, nn.Conv2d) for m in network.modules()) > 1:
        network.to(memory_format=torch.channels_last)


class Tower(typing.NamedTuple):
    """A network from images or clips to features (., width), and its properties."""
    body: nn.Module
    width: int
    projection: nn.Module = None      # a CLIP's own
    config: dict = None               # of transformers
    stats: tuple = STATS["half"]      # of its pixels
    whole_clips: bool = False         # False: a clip is the mean of its frames
    read: object = None               # function (encoder, pixels) -> features, if body(frames) does not return them


class TwoTower(nn.Module):
    """An image encoder and a text encoder into one space. DDP needs one forward for everything that a step encodes.

    forward(pixels, tokens) -> image (B, D), text (B, D), features (B, width); embeddings are not normalised.
    """

    def __init__(self, vision, text):
        super().__init__()
        self.vision, self.text = vision, text

    def forward(self, pixels=None, tokens=None):
        features, image = self.vision(pixels) if pixels is not None else (None, None)
        return image, self.text(**tokens) if tokens is not None else None, features


def clip_width(name):
    """projection_dim of a CLIP by name (or clip_vip:NAME), else 0."""
    name = name.removeprefix(CLIP_VIP)
    if "/" not in name and not Path(name).is_dir():
        return 0
    import transformers
    with opening(name):
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    return config.projection_dim if config.model_type == "clip" else 0     # of one tower alone, hub_encoder has none


def is_clip(name):
    """Whether a name is a CLIP's: of a folder by its config, of a hub id by its name, without the hub; timm's are not.
    """
    return clip_width(name) > 0 if Path(name).is_dir() else "/" in name and "clip" in name.lower()


def hub_encoder(name, half, pretrained, config):
    """The Tower of a transformers model by id or folder; of a CLIP the 'vision' or 'text' half, with its projection.

    config: of a model that is rebuilt, as a dict; else None."""
    import transformers
    with opening(name):
        of = transformers.AutoConfig
        config = of.for_model(**config) if config else of.from_pretrained(name, trust_remote_code=False)
        encoder_alone = half == "text" and config.model_type == "t5"
        kind = transformers.AutoModelForTextEncoding if encoder_alone else transformers.AutoModel
        body = published(kind, name, config) if pretrained else kind.from_config(config, **FULL)
        if config.model_type != "clip":
            width = getattr(config, "hidden_size", 0) or config.hidden_sizes[-1]
            return Tower(body, width, config=config.to_dict())
        parts = {"vision": (body.vision_model, body.visual_projection), "text": (body.text_model, body.text_projection)}
        return Tower(parts[half][0], parts[half][0].config.hidden_size, parts[half][1], config.to_dict())


def published(kind, name, config):
    """The transformers model of a class, id and config with its published weights.

    Raises: UserError if they lack most of the model's tensors, which would silently be random."""
    model, found = kind.from_pretrained(name, config=config, output_loading_info=True, **FULL)
    note_commit(name)
    missing = sorted(k for k in found["missing_keys"] if "pooler" not in k)
    if 2 * len(missing) > len(model.state_dict()):
        raise UserError(f"{name}: its weights lack {missing[0]} and {len(missing) - 1} more: they are another model's")
    return model
