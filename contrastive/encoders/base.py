"""The parts of encoders: pixel statistics, the small encoders, a pair of encoders, and models of
transformers by name."""

import functools
import typing

from contrastive.core.processes import UserError, opening, print_main, world_size
from contrastive.data.hub import note_commit

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import forward_ad

# Mean and standard deviation of the pixels, named after the weights or the code that use them.
STATS = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}
# Parts of the names of tensors that weights may lack: counters of BatchNorm, constants, and
# poolers, whose own layer no embedding reads.
OPTIONAL_PARTS = "num_batches_tracked", "position_ids", "pooler.", "mask_token"
# Options of every transformers model: some are published in half precision.
TRANSFORMERS_OPTIONS = {"dtype": torch.float32, "trust_remote_code": False}


# ============================================= BatchNorm ==========================================
def batchnorms(model):
    """The BatchNorm layers of a model, but for those inside a frozen encoder."""
    frozen = set()
    for module in model.modules():
        if getattr(module, "frozen", False):
            frozen.update(module.body.modules())
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return [layer for layer in layers if layer not in frozen]


def sync_batchnorm(model, args):
    """The model, with SyncBatchNorm in place of BatchNorm if it trains on several GPUs.

    Raises:
        UserError: with --chunk-size, where the statistics would be those of a chunk.
    """
    if not batchnorms(model):
        return model
    if args.chunk_size:
        raise UserError(
            f"--chunk-size {args.chunk_size}: {args.image_encoder} has BatchNorm, whose statistics "
            "would be those of a chunk; give --chunk-size 0, or an encoder without BatchNorm")
    if world_size() == 1:
        return model
    if torch.cuda.is_available() and not args.cpu:
        # torch's own function loses the activations inside timm's norms
        from timm.layers import convert_sync_batchnorm

        return convert_sync_batchnorm(model)
    print_main("BatchNorm on several CPU processes: each process has its own statistics, so the "
               "run differs from a run on one process")
    return model


# =========================================== small encoders =======================================
class GroupNorm(nn.GroupNorm):
    """torch's GroupNorm, also for forward-mode derivatives of channels-last images, which mama.py
    needs and torch before 2.14 refuses."""

    REFUSES_CHANNELS_LAST = torch.__version__ < "2.14"

    def forward(self, x):
        if self.REFUSES_CHANNELS_LAST and forward_ad.unpack_dual(x).tangent is not None:
            x = x.contiguous()
        return super().forward(x)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a skip connection; it starts as the identity."""

    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = GroupNorm(8, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = GroupNorm(8, width)
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class SmallCNN(nn.Sequential):
    """A four-stage residual network of about half a million weights, with GroupNorm only.

    forward: (B, 3, S, S) -> (B, 128). It computes in channels-last order.
    """

    def __init__(self):
        layers = []
        in_channels = 3
        for stage, width in enumerate((16, 32, 64, 128)):
            layers.append(nn.Conv2d(in_channels, width, 3, stride=2, padding=1, bias=False))
            layers.append(GroupNorm(8, width))
            layers.append(nn.ReLU())
            if stage > 0:
                layers.append(ResidualBlock(width))
            in_channels = width
        layers.append(nn.AdaptiveAvgPool2d(1))
        layers.append(nn.Flatten())
        super().__init__(*layers)
        self.to(memory_format=torch.channels_last)

    def forward(self, images):
        return super().forward(images.contiguous(memory_format=torch.channels_last))


def masked_mean(x, keep):
    """Mean of x (..., L, width) over the places where keep (..., L) is 1 or True: (..., width)."""
    return (x * keep[..., None]).sum(-2) / keep.sum(-1, keepdim=True)


def transformer_layer(width):
    """The modules of one layer of a Transformer."""
    return nn.ModuleDict({
        "norm1": nn.LayerNorm(width),
        "qkv": nn.Linear(width, 3 * width),
        "out": nn.Linear(width, width),
        "norm2": nn.LayerNorm(width),
        "fc1": nn.Linear(width, 4 * width),
        "fc2": nn.Linear(4 * width, width),
    })


class Transformer(nn.ModuleList):
    """Pre-norm transformer layers.

    Attributes:
        dropout: probability 0..1, of the input, the attention and the MLP; ssb.set_dropout sets it.
    """

    def __init__(self, width, layers, heads):
        super().__init__([transformer_layer(width) for _ in range(layers)])
        self.heads = heads
        self.dropout = 0.0

    def forward(self, x, keep, first=0):
        """x (B, L, width) -> (B, L, width), or (B, first, width).

        Args:
            keep: (B, L) bool, True at a token and False at padding.
            first: the last layer returns only so many of the first tokens; 0 = all.
        """
        B, L = keep.shape
        drop = functools.partial(F.dropout, p=self.dropout, training=self.training)
        x = drop(x)
        for layer in self:
            qkv = layer["qkv"](layer["norm1"](x))
            qkv = qkv.view(B, L, 3, self.heads, -1)        # (B, L, 3, heads, width / heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)           # (B, heads, L, width / heads) each
            if first and layer is self[-1]:
                q = q[:, :, :first]
                x = x[:, :first]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None])
            x = x + drop(layer["out"](y.transpose(1, 2).flatten(2)))
            y = F.gelu(layer["fc1"](layer["norm2"](x)))    # (B, L, 4 * width)
            x = x + drop(layer["fc2"](y))
        return x


class SmallText(nn.Module):
    """A transformer of one layer over WordPiece ids.

    forward: ids and mask (B, L) -> states of the tokens (B, L, width), their mean (B, width).
    """

    def __init__(self, vocabulary, length, width=128):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width, padding_idx=0)
        self.position = nn.Parameter(torch.randn(length, width) * 0.01)
        nn.init.normal_(self.token.weight, std=0.02)
        self.blocks = Transformer(width, layers=1, heads=4)
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids, attention_mask):
        keep = attention_mask.bool()                                     # (B, L)
        x = self.token(input_ids) + self.position[:keep.shape[1]]        # (B, L, width)
        x = self.norm(self.blocks(x, keep))
        return x, masked_mean(x, keep)


def channels_last(network):
    """Stores the kernels of a convolutional network in channels-last order, faster on GPUs.

    A network with one convolution, a ViT, stays as it is.
    """
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    if len(convolutions) > 1:
        network.to(memory_format=torch.channels_last)


def as_clips(pixels):
    """Clips (B, T, 3, S, S) as they are; images (B, 3, S, S) as clips of one frame."""
    if pixels.ndim == 5:
        return pixels
    return pixels[:, None]


# ============================================== backbones =========================================
class Backbone(typing.NamedTuple):
    """A network from images, clips or texts to features (., width), and its properties.

    Attributes:
        is_embedding: its features are the embeddings: no projection follows.
        projection: a CLIP's own layer from features to embeddings.
        config: of a transformers model, as a dict.
        stats: mean and standard deviation of its pixels; None = those that the files of a
            transformers model say.
        frame_features: function (encoder, pixels) -> features (B * T, width), where calling
            body(frames) does not return them.
    """

    body: nn.Module
    width: int
    is_embedding: bool = False
    projection: nn.Module | None = None
    config: dict | None = None
    stats: tuple | None = STATS["half"]
    frame_features: typing.Callable | None = None

    @property
    def model_type(self):
        """Of a transformers model, such as "clip"; else ""."""
        if not self.config:
            return ""
        return self.config["model_type"]


class TwoTower(nn.Module):
    """An image encoder and a text encoder into one space.

    DDP needs one forward for everything that a step encodes.

    Attributes:
        cached_images: ImageFeatures of a frozen image encoder, which evaluation reads; else None.
    """

    cached_images = None

    def __init__(self, vision, text):
        super().__init__()
        self.vision = vision
        self.text = text

    def forward(self, pixels=None, tokens=None):
        """Images or clips and tokens -> image (B, D), text (B, D), features (B, width).

        A frozen encoder also takes features computed before, in place of pixels or tokens. What is
        not passed is None in the result. Embeddings are not normalised.
        """
        image, text, features = None, None, None
        if pixels is not None:
            features, image = self.vision(pixels)
        if tokens is not None:
            text = self.text(**tokens)
        return image, text, features


# ======================================== models of transformers ==================================
def hub_encoder(name, half, pretrained, config):
    """The Backbone of a transformers model, by its hub id or folder.

    Args:
        half: "vision" or "text", which of a CLIP's encoders, with its projection.
        pretrained: read its published weights; else they are random.
        config: of a model that is rebuilt, as a dict; else None.
    """
    import transformers

    with opening(name):
        if config:
            config = transformers.AutoConfig.for_model(**config)
        else:
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        if config.model_type != "clip" and not feature_width(config):
            raise UserError(f"{name}: the config of a {config.model_type} names no width of "
                            "features, as of several encoders; give a CLIP, or a folder with one "
                            "of its encoders")
        model_class = transformers.AutoModel
        if half == "text" and config.model_type == "t5":
            model_class = transformers.AutoModelForTextEncoding  # the encoder alone
        if pretrained:
            model = load_published(model_class, name, config)
        else:
            model = model_class.from_config(config, **TRANSFORMERS_OPTIONS)
        if config.model_type != "clip":
            return Backbone(model, feature_width(config), config=config.to_dict())
    if half == "vision":
        body, projection = model.vision_model, model.visual_projection
    elif half == "text":
        body, projection = model.text_model, model.text_projection
    else:
        raise ValueError(f"half is 'vision' or 'text', not {half!r}")
    return Backbone(
        body, body.config.hidden_size, projection=projection, config=config.to_dict())


def feature_width(config):
    """The width of the features of a transformers model, by its config; 0 if it has several."""
    widths = getattr(config, "hidden_sizes", None) or [0]  # widths of the stages of a ResNet
    return getattr(config, "hidden_size", 0) or widths[-1]


def num_positions(body):
    """Most tokens that a text model of transformers reads; 0 = any number, or it is none."""
    positions = getattr(getattr(body, "config", None), "max_position_embeddings", 0) or 0
    for module in body.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            # RoBERTa counts from the place after its padding
            positions = table.num_embeddings - table.padding_idx - 1
    return positions


def mask_of_body(body, mask):
    """The attention mask that a bidirectional transformers model reads, of a mask (B, L).

    A mask (B, 1, 1, L) is taken as it is; of (B, L) transformers first asks whether it is all 1,
    which waits for the GPU. Eager attention would add a bool mask as numbers, so it gets (B, L),
    from which transformers makes its own.
    """
    if body.config._attn_implementation == "sdpa":
        return mask[:, None, None].bool()                                # (B, 1, 1, L)
    return mask


def load_published(model_class, name, config, optional=OPTIONAL_PARTS):
    """A transformers model with its published weights.

    Args:
        model_class: a class of transformers.
        name: hub id or folder.
        config: the model's configuration.
        optional: parts of the names of tensors that may be missing there.

    Raises:
        UserError: if another tensor is missing there, which would be random.
    """
    model, loading_info = model_class.from_pretrained(
        name, config=config, output_loading_info=True, **TRANSFORMERS_OPTIONS)
    note_commit(name)
    missing = []
    for tensor_name in sorted(loading_info["missing_keys"]):
        if not any(part in tensor_name for part in optional):
            missing.append(tensor_name)
    if missing:
        raise UserError(f"{name}: its weights lack {missing[0]} and {len(missing) - 1} more "
                        "tensors: they are those of another model")
    return model
