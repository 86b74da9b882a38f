"""VAST, the base model of MM-TS on YouCook2 and SSv2-LT (Chen et al., NeurIPS 2023).

A clip is V, A and S: T frames, one slice of sound and one subtitle, or those of them that
--modalities names. Steps and sizes are those of the authors' code and of their released weights,
which --init-from loads:

    V   EVA-CLIP-g/14 of each frame, 257 tokens of width 1408                   (B, T, 257, 1408)
    A   BEATs of the slice (1024 windows, 64 mel bands), 256 tokens                 (B, 256, 768)
    S   BERT of the subtitle, 70 tokens with padding                                 (B, 70, 768)
    clip   one Linear of [mean over frames of their CLS; mean over A; CLS of S]            (B, D)
    text   BERT of the caption, CLS, Linear; the same BERT as of S                         (B, D)

The matching head says whether a caption belongs to a clip. The tokens of V, A and S, each through a
Linear, a LayerNorm and embeddings of their frame and kind, are one sequence, which the caption's
BERT reads by cross-attention in all of its layers; two layers on its CLS give the logits of no and
yes. variants/mmts_vast.py trains it.

`vast` has the released widths. `vast-small` is the same model at small widths, without published
weights; it reads 2.56 s of sound.
docs/mmts.md lists the differences from the authors' code.
"""

import math
import re
from typing import NamedTuple

from contrastive.core.processes import UserError, opening, print_main
from contrastive.data.hub import note_commit
from contrastive.data.sound import BANDS, SLICE_LENGTH
from contrastive.encoders.base import (
    OPTIONAL_PARTS, STATS, TRANSFORMERS_OPTIONS, Backbone, TwoTower, as_clips, load_published,
    mask_of_body)
from contrastive.encoders.towers import TextEncoder, VisionEncoder

import torch
import torch.nn as nn
import torch.nn.functional as F

MODALITIES = ("v", "a", "s", "va", "vs", "vas")  # those with a head of their own
SUBTITLE_LENGTH = 70  # tokens of a subtitle, with padding
EPS = 1e-12  # added to the variance in the LayerNorms of the matching head, as in BERT


class Size(NamedTuple):
    """The widths of a VAST."""

    vision: dict  # keywords of timm's EVA giant
    audio: "BeatsSize"
    text: dict  # entries of BERT's configuration that are replaced
    frames: int  # frame embeddings of the matching head


class BeatsSize(NamedTuple):
    """The widths of BEATs."""

    width: int = 768
    patch_width: int = 512
    layers: int = 12
    heads: int = 12
    groups: int = 16  # groups of the convolution of positions
    windows: int = SLICE_LENGTH  # number of windows of a slice that are read


SIZES = {
    "vast": Size({}, BeatsSize(), {}, frames=8),
    "vast-small": Size(
        {"embed_dim": 64, "depth": 2, "num_heads": 4, "mlp_ratio": 4.0, "patch_size": 8},
        BeatsSize(width=64, patch_width=32, layers=2, heads=4, groups=4, windows=256),
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 128, "max_position_embeddings": 128,
         "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        frames=4)}


# ===================================================== vision =====================================
def vision_backbone(name, pretrained, image_size):
    """The Backbone of VAST's vision encoder, timm's EVA giant at the widths of a SIZES entry."""
    import timm

    with opening("eva_giant_patch14_clip_224"):
        body = timm.create_model(
            "eva_giant_patch14_clip_224", pretrained=pretrained, num_classes=0,
            img_size=image_size, **SIZES[name].vision)
    if pretrained:
        note_commit(body.pretrained_cfg.get("hf_hub_id") or "")
    return Backbone(body, body.num_features, stats=STATS["clip"])


# ===================================================== audio ======================================
class PositionConvolution(nn.Module):
    """A grouped convolution over time with a kernel of 128, whose weight is g v / |v| for each
    place of the kernel; then GELU. It adds positions to the tokens."""

    KERNEL = 128

    def __init__(self, width, groups):
        super().__init__()
        self.groups = groups
        deviation = math.sqrt(4 / (self.KERNEL * width))
        v = torch.randn(width, width // groups, self.KERNEL) * deviation
        self.weight_v = nn.Parameter(v)
        self.weight_g = nn.Parameter(v.norm(dim=(0, 1), keepdim=True))     # (1, 1, 128)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        """(B, L, width) -> (B, L, width)."""
        length = self.weight_v.norm(dim=(0, 1), keepdim=True)              # (1, 1, 128)
        weight = self.weight_g * self.weight_v / length
        x = F.conv1d(x.transpose(1, 2), weight, self.bias, padding=self.KERNEL // 2,
                     groups=self.groups)                                   # (B, width, L + 1)
        return F.gelu(x[..., :-1]).transpose(1, 2)


class BeatsAttention(nn.Module):
    """Self-attention with a gated bias by relative position.

    The bias of head h between tokens i and j is b_h(j - i), one of 320 learnt numbers, times a gate
    of the query: g1 (g2 a_h - 1) + 2, where g1 and g2 are sigmoids of sums of four outputs of a
    Linear of the query.
    """

    BUCKETS = 320
    MAX_DISTANCE = 800

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)
        self.grep_linear = nn.Linear(width // heads, 8)
        self.grep_a = nn.Parameter(torch.ones(1, heads, 1, 1))

    def forward(self, x, relative_bias):
        """Tokens (B, L, width), biases (heads, L, L) -> (B, L, width)."""
        q, k, v = [self.split(layer(x)) for layer in (self.q_proj, self.k_proj, self.v_proj)]
        gates = self.grep_linear(q).unflatten(-1, (2, 4)).sum(-1)          # (B, heads, L, 2)
        gate1, gate2 = gates.sigmoid().split(1, -1)                        # (B, heads, L, 1) each
        gate = gate1 * (gate2 * self.grep_a - 1) + 2                       # (B, heads, L, 1)
        bias = gate * relative_bias                                        # (B, heads, L, L)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def split(self, x):
        """(B, L, width) -> (B, heads, L, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def relative_buckets(length):
    """(L, L) number of the bias of query i and key j: 0..159 for keys up to the query, 160..319 for
    later ones. Each distance below 80 has its own; those up to 800 share them in logarithmic steps.
    """
    half = BeatsAttention.BUCKETS // 2
    exact = half // 2
    place = torch.arange(length)
    distance = place[None] - place[:, None]                                # (L, L) j - i
    steps = torch.log(distance.abs().clamp(min=1) / exact) \
        / math.log(BeatsAttention.MAX_DISTANCE / exact) * (half - exact)
    far = (exact + steps.long()).clamp(max=half - 1)
    bucket = torch.where(distance.abs() < exact, distance.abs(), far)
    return bucket + half * (distance > 0)


class BeatsLayer(nn.Module):
    """A post-norm layer whose residuals count (2 layers)^(1/4) times."""

    def __init__(self, size):
        super().__init__()
        self.scale = (2 * size.layers) ** 0.25
        self.self_attn = BeatsAttention(size.width, size.heads)
        self.self_attn_layer_norm = nn.LayerNorm(size.width)
        self.fc1 = nn.Linear(size.width, 4 * size.width)
        self.fc2 = nn.Linear(4 * size.width, size.width)
        self.final_layer_norm = nn.LayerNorm(size.width)

    def forward(self, x, relative_bias):
        x = self.self_attn_layer_norm(self.scale * x + self.self_attn(x, relative_bias))
        y = self.fc2(F.gelu(self.fc1(x)))                                  # (B, L, width)
        return self.final_layer_norm(self.scale * x + y)


class Beats(nn.Module):
    """BEATs (Chen et al., ICML 2023): slices of sound (B, 1024, 64) -> tokens (B, 256, width).

    A token is a patch of 16 windows and 16 bands; tokens are ordered by time, then by band.
    """

    PATCH = 16

    def __init__(self, size):
        super().__init__()
        self.windows = size.windows
        self.patch_embedding = nn.Conv2d(
            1, size.patch_width, self.PATCH, stride=self.PATCH, bias=False)
        self.layer_norm = nn.LayerNorm(size.patch_width)
        self.post_extract_proj = nn.Linear(size.patch_width, size.width)
        self.pos_conv = PositionConvolution(size.width, size.groups)
        self.norm = nn.LayerNorm(size.width)
        self.layers = nn.ModuleList([BeatsLayer(size) for _ in range(size.layers)])
        # shared by all layers
        self.relative_bias = nn.Embedding(BeatsAttention.BUCKETS, size.heads)
        length = (size.windows // self.PATCH) * (BANDS // self.PATCH)      # L
        self.register_buffer("buckets", relative_buckets(length), persistent=False)

    def forward(self, sound):
        sound = sound[:, None, :self.windows]                              # (B, 1, windows, 64)
        x = self.patch_embedding(sound)                                    # (B, patch, 64, 4)
        x = self.layer_norm(x.flatten(2).transpose(1, 2))                  # (B, L, patch)
        x = self.post_extract_proj(x)                                      # (B, L, width)
        x = self.norm(x + self.pos_conv(x))
        relative_bias = self.relative_bias(self.buckets).permute(2, 0, 1)  # (heads, L, L)
        for layer in self.layers:
            x = layer(x, relative_bias)
        return x


# ===================================================== texts ======================================
def bert_backbone(encoder, name, *, pretrained=False, vocabulary=0, config=None):
    """The Backbone of VAST's BERT, without a pooler, and with cross-attention, by which it reads a
    clip.

    Args:
        encoder: key of SIZES.
        name: "small", or the transformers id or folder of a BERT.
        vocabulary: number of tokens, of "small".
        config: of a model that is rebuilt, as a dict.
    Raises: UserError if it is no BERT.
    """
    import transformers

    with opening(name):
        if config:
            config = transformers.AutoConfig.for_model(**config)
        elif name == "small":
            config = transformers.BertConfig(vocab_size=vocabulary, **SIZES["vast-small"].text)
        else:
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
            config.update(SIZES[encoder].text)
        if config.model_type != "bert":
            raise UserError(f"--text-encoder {name}: VAST's text encoder is a BERT, this is a "
                            f"model of the type {config.model_type}")
        # transformers builds cross-attention for decoders alone
        config.is_decoder = True
        config.add_cross_attention = True
        if pretrained and name != "small":
            optional = *OPTIONAL_PARTS, "crossattention."
            body = load_published(transformers.BertModel, name, config, optional)
            body.pooler = None
        else:
            config.dtype = TRANSFORMERS_OPTIONS["dtype"]
            body = transformers.BertModel(config, add_pooling_layer=False)
    # no causal mask: CLS is the first token, and would see none of the others
    body.config.is_decoder = False
    return Backbone(body, config.hidden_size, config=config.to_dict())


def subtitle_tokens(tokenizer, subtitles):
    """The ids and masks (b, 70) of subtitles: always 70 tokens, since the matching head reads their
    padding, too.

    Args: tokenizer: Tokenizer of the captions.
    """
    tokens = tokenizer.tokenizer(
        list(subtitles), padding="max_length", truncation=True, max_length=SUBTITLE_LENGTH,
        return_tensors="pt")
    return {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}


# ===================================================== model ======================================
class Pairs(NamedTuple):
    """P pairs of a clip and a caption for the matching head, ordered by clip."""

    clips: torch.Tensor  # (P,) long, rows of the clips of a batch
    ids: torch.Tensor  # (P, L) of the captions
    mask: torch.Tensor  # (P, L)
    target: torch.Tensor  # (P,) long, 1 if they belong together

    def of_clips(self, start, stop):
        """The pairs of the clips start .. stop - 1, which become 0, 1, ..."""
        is_inside = (self.clips >= start) & (self.clips < stop)            # (P,)
        part = Pairs(*(x[is_inside] for x in self))
        return part._replace(clips=part.clips - start)


class MatchingHead(nn.Module):
    """The layers and embeddings of the matching head, without those of BERT.

    Args:
        widths: {kind: width of its tokens} for "vision", "audio" and "subtitle", in this order.
        width: of BERT.
        frames: embeddings of frames.
    """

    def __init__(self, widths, width, frames):
        super().__init__()
        self.linears = nn.ModuleDict()
        self.norms = nn.ModuleDict()
        self.kinds = nn.ParameterDict()
        self.frames = nn.ParameterDict()
        for kind, kind_width in widths.items():
            self.linears[kind] = nn.Linear(kind_width, width)
            self.norms[kind] = nn.LayerNorm(width, EPS)
            self.kinds[kind] = nn.Parameter(0.02 * torch.randn(1, 1, width))
        for kind, number in (("vision", frames), ("audio", 1)):
            if kind in widths:
                self.frames[kind] = nn.Parameter(0.02 * torch.randn(1, number, width))
        self.linear1 = nn.Linear(width, width)
        self.layernorm = nn.LayerNorm(width, EPS)
        self.linear2 = nn.Linear(width, 2)

    def condition(self, tokens):
        """What BERT's cross-attention reads: {kind: (b, frames, tokens, width) or, of subtitles,
        (b, tokens, width)} -> one sequence for each clip, (b, all tokens, width of BERT)."""
        parts = []
        for kind, x in tokens.items():
            x = self.norms[kind](self.linears[kind](x))
            if kind in self.frames:
                places = nearest_frames(self.frames[kind], x.shape[1])     # (1, frames, width)
                x = (x + places[:, :, None]).flatten(1, 2)                 # (b, tokens, width)
            parts.append(x + self.kinds[kind])
        return torch.cat(parts, 1)

    def logits(self, cls):
        """CLS of BERT (P, width) -> logits (P, 2) of no and yes."""
        return self.linear2(self.layernorm(F.gelu(self.linear1(cls))))


def nearest_frames(embeddings, number):
    """Embeddings of frames (1, n, width) -> (1, number, width), the nearest of each."""
    return F.interpolate(embeddings.transpose(1, 2), number, mode="nearest").transpose(1, 2)


class Vast(TwoTower):
    """VAST.

    Args:
        vision: VisionEncoder whose body is EVA, without a projection.
        text: TextEncoder whose body is BERT with cross-attention, with its projection.
        dim: D.
        modalities: of MODALITIES.

    Attributes:
        released_tau: temperature of the released weights that were loaded; else None.
    """

    released_tau = None

    def __init__(self, vision, text, dim, modalities):
        super().__init__(vision, text)
        size = SIZES[vision.name]
        self.modalities = modalities
        widths = {}
        if "v" in modalities:
            widths["vision"] = vision.width
        if "a" in modalities:
            self.audio = Beats(size.audio)
            widths["audio"] = size.audio.width
        if "s" in modalities:
            widths["subtitle"] = text.width
        self.clip_head = nn.Linear(sum(widths.values()), dim, bias=len(widths) > 1)
        self.matching = MatchingHead(widths, text.width, size.frames)

    def forward(self, pixels=None, tokens=None, pairs=None):
        """Clips and captions -> clip (B, D), text (B, D), features (B, width) before the clip head.
        With pairs, their logits (P, 2) take the place of the features.

        Args:
            pixels: {frames: (B, T, 3, S, S), sound: (B, 1024, 64), subtitle: {input_ids,
                attention_mask: (B, 70)}}, or the frames alone, or images.
            tokens: of the captions, {input_ids, attention_mask: (B, L)}.
            pairs: Pairs of these clips and of any captions.
        """
        clip, text, features = None, None, None
        if pixels is not None:
            clip_tokens = self.clip_tokens(pixels)
            features = self.pool(clip_tokens)                              # (B, width)
            clip = self.clip_head(features)                                # (B, D)
        if tokens is not None:
            text = self.text(**tokens)                                     # (B, D)
        if pairs is not None:
            condition = self.matching.condition(clip_tokens)               # (B, all tokens, width)
            features = self.match(condition, pairs)                        # (P, 2)
        return clip, text, features

    def clip_tokens(self, pixels):
        """{kind: tokens} of V (B, T, 257, width), A (B, 1, 256, width), S (B, 70, width)."""
        if torch.is_tensor(pixels):
            pixels = {"frames": pixels}
        tokens = {}
        if "v" in self.modalities:
            frames = as_clips(pixels["frames"])                            # (B, T, 3, S, S)
            x = self.vision.body.forward_features(frames.flatten(0, 1))
            tokens["vision"] = x.unflatten(0, frames.shape[:2])
        if "a" in self.modalities:
            tokens["audio"] = self.audio(pixels["sound"])[:, None]
        if "s" in self.modalities:
            tokens["subtitle"], _ = self.text.states(**pixels["subtitle"])
        return tokens

    def pool(self, tokens):
        """{kind: tokens} -> (B, width): CLS of the frames, mean of the sound, CLS of the subtitle.
        """
        parts = []
        if "vision" in tokens:
            parts.append(tokens["vision"][:, :, 0].mean(1))
        if "audio" in tokens:
            parts.append(tokens["audio"].mean((1, 2)))
        if "subtitle" in tokens:
            parts.append(tokens["subtitle"][:, 0])
        return torch.cat(parts, -1)

    def match(self, condition, pairs):
        """Logits (P, 2) of Pairs, by the tokens (b, tokens, width) of their clips."""
        output = self.text.body(
            input_ids=pairs.ids, attention_mask=mask_of_body(self.text.body, pairs.mask),
            encoder_hidden_states=condition[pairs.clips], use_cache=False)
        return self.matching.logits(output.last_hidden_state[:, 0])

    def example(self, pixels, tokens):
        """The inputs of a forward that uses all parts of the model, from one image and one text."""
        device = self.clip_head.weight.device  # meta in an estimate
        tokens = {name: x.to(device) for name, x in (tokens or {}).items()}
        inputs = {
            "frames": pixels.to(device),
            "sound": torch.zeros(1, SLICE_LENGTH, BANDS, device=device),
            "subtitle": tokens}
        clips = torch.zeros(1, dtype=torch.long, device=device)
        return [inputs, tokens, Pairs(clips, tokens["input_ids"], tokens["attention_mask"], clips)]


def build_vast(spec, tokenizer, pretrained, vision_pretrained):
    """The Vast of a spec, as models.initial_model builds other models.

    Args:
        spec: the content of model.json.
        tokenizer: of the captions.
        pretrained: read published weights of BERT.
        vision_pretrained: read those of the image encoder.
    """
    vision = VisionEncoder(
        spec["image_encoder"], 0, vision_pretrained, spec["image_size"],
        spec.get("vision_config"))
    vocabulary = len(tokenizer.tokenizer)
    backbone = bert_backbone(
        spec["image_encoder"], spec["text_encoder"], pretrained=pretrained,
        vocabulary=vocabulary, config=spec.get("text_config"))
    text = TextEncoder(
        spec["text_encoder"], spec["embed_dim"], backbone=backbone,
        projection_bias=spec.get("projection_bias", False))
    return Vast(vision, text, spec["embed_dim"], spec["modalities"])


def modalities_of(args, train):
    """Those of --modalities that the training data have.

    Raises: UserError if the command line asks for others, or if none is left.
    """
    if not hasattr(args, "modalities"):
        raise UserError(f"--image-encoder {args.image_encoder}: this script does not train it; use "
                        "python -m variants.mmts_vast")
    letters = args.modalities
    if letters != "v":
        letters = train.available_modalities()
    if not letters:
        raise UserError(f"--modalities {args.modalities}: {train.name} has none of them; give v")
    if letters != args.modalities:
        if "--modalities" in args.command_line:
            raise UserError(f"--modalities {args.modalities}: {train.name} has no more than "
                            f"{letters}; give that, or leave the flag out")
        print_main(f"--modalities {args.modalities} -> {letters}, which {train.name} has")
    return letters


# ===================================================== released weights ===========================
# CLIP's own text encoder, the head of masked words, the temperature, and the layers' copies of the
# one relative bias of BEATs
LEFT_OUT = (
    r"vision_encoder\.(text\.|logit_scale$|visual\.head\.)|multimodal_encoder\.cls\.|contra_temp$"
    r"|.*\.position_ids$|.*\.relative_attention_bias\.weight$")
# beginnings of the names in the released file -> ours; the first that fits counts
RELEASED_NAMES = {
    r"vision_encoder\.visual\.": "vision.body.",
    r"audio_encoder\.encoder\.layers\.": "audio.layers.",
    r"audio_encoder\.encoder\.layer_norm\.": "audio.norm.",
    r"audio_encoder\.encoder\.pos_conv\.0\.": "audio.pos_conv.",
    r"audio_encoder\.": "audio.",
    r"multimodal_encoder\.bert\.": "text.body.",
    r"contra_head_t\.linear\.": "text.projection.",
    r"itm_head\.": "matching.",
    r"hidden_trans_(\w+)_multimodal\.0\.": r"matching.linears.\1.",
    r"hidden_trans_(\w+)_multimodal\.1\.": r"matching.norms.\1.",
    r"(\w+)_frame_embedding$": r"matching.frames.\1",
    r"(\w+)_type_embeddings$": r"matching.kinds.\1"}
RELATIVE_BIAS = "audio_encoder.encoder.layers.0.self_attn.relative_attention_bias.weight"


def convert_vast(model, weights):
    """The released tensors by our names, without those of parts that the model lacks. As in the
    authors' code, the embeddings of frames are repeated or left out to fit their number.

    Args:
        model: Vast, which gets the released temperature.
        weights: {name: tensor} of the released file, as it is or with the authors' older names.
    """
    if "contra_temp" in weights:
        model.released_tau = weights["contra_temp"].item()
    tensors = {}
    for name, tensor in weights.items():
        name = name.replace("video", "vision")
        name = re.sub(r"evaclip_model|clip_model", "vision_encoder", name)
        if name == RELATIVE_BIAS:
            tensors["audio.relative_bias.weight"] = tensor
        if not re.match(LEFT_OUT, name):
            tensors[our_name(name, model.modalities)] = tensor
    tensors = {name: x for name, x in tensors.items() if not is_of_absent_part(name, model)}
    for kind, embeddings in model.matching.frames.items():
        name = f"matching.frames.{kind}"
        if name in tensors:
            tensors[name] = nearest_frames(tensors[name], embeddings.shape[1])
    return tensors


def our_name(name, modalities):
    """Our name of a released tensor; its own if we have none."""
    head = re.fullmatch(r"contra_head_(\w+?)(\.linear)?\.(weight|bias)", name)
    if head and head[1] == modalities:
        return f"clip_head.{head[3]}"
    for pattern, ours in RELEASED_NAMES.items():
        if re.match(pattern, name):
            return re.sub(f"^{pattern}", ours, name)
    return name


def is_of_absent_part(name, model):
    """Whether a tensor belongs to a part that a Vast was built without: the heads of other
    modalities, the sound."""
    if re.match(r"contra_head_(v|a|s|va|vs|vas)\.", name):
        return True
    if name.startswith("audio."):
        return "a" not in model.modalities
    kind = re.match(r"matching\.\w+\.(vision|audio|subtitle)", name)
    return kind is not None and kind[1] not in model.matching.linears
