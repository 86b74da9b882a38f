"""The image encoder and the text encoder of a run: a body and a projection each."""

import functools

from contrastive.core.processes import print_main
from contrastive.encoders.base import Backbone, SmallText, hub_encoder, mask_of_body, masked_mean
from contrastive.encoders.image_encoders import BuildOptions, encoder_kind, hub_stats

import torch.nn as nn
import torch.nn.functional as F


def projection_layer(width, embed_dim, bias=False):
    """The layer from features to embeddings; the identity if embed_dim is 0."""
    if not embed_dim:
        return nn.Identity()
    return nn.Linear(width, embed_dim, bias=bias)


class Encoder(nn.Module):
    """A body, which may be frozen, and a projection, which always learns.

    Attributes:
        frozen: whether the body does not learn, and stays in eval mode.
    """

    frozen = False

    def freeze(self):
        """Freezes the body."""
        self.frozen = True
        self.body.requires_grad_(False)
        self.train(self.training)

    def train(self, mode=True):
        super().train(mode)
        if self.frozen:
            self.body.eval()
        return self


class VisionEncoder(Encoder):
    """Images or clips -> features (B, width) and embeddings (B, D).

    forward: (B, 3, S, S), or (B, T, 3, S, S), of which it takes the mean over the T frames; or
    features of images (B, width) or of the frames of clips (B, T, width), computed before.

    Args:
        name: as --image-encoder takes it; encoders/image_encoders.py has the table.
        embed_dim: D; 0 = only features.
        pretrained: read published weights.
        image_size: pixels of a side.
        config: of a transformers model that is rebuilt, as a dict.
        features: (T, F) of precomputed features.
        frames: T, for an encoder that is made for one number of frames.
        projection_bias: whether a new projection has a bias.
    """

    def __init__(self, name, embed_dim, pretrained=True, image_size=224, config=None, *,
                 projection_bias=False, features=(0, 0), frames=0):
        super().__init__()
        self.name = name
        self.kind = encoder_kind(name, config)
        options = BuildOptions(
            pretrained=pretrained, image_size=image_size, embed_dim=embed_dim, config=config,
            num_features=features[1], num_frames=frames)
        backbone = self.kind.build(name.removeprefix(self.kind.prefix), options)
        self.body = backbone.body
        self.width = backbone.width
        self.config = backbone.config
        self.model_type = backbone.model_type
        self.is_clip = backbone.model_type.startswith("clip")
        self.backbone_stats = backbone.stats
        self.frame_features = backbone.frame_features

        clip_projection = backbone.projection
        if backbone.is_embedding:
            self.projection = nn.Identity()
        elif has_width(clip_projection, embed_dim):
            self.projection = clip_projection
        else:
            self.projection = projection_layer(self.width, embed_dim, projection_bias)
            if clip_projection is not None and pretrained and embed_dim:
                print_main(f"--embed-dim {embed_dim}: the projections of {name}, of width "
                           f"{clip_projection.out_features}, are replaced by new ones")

    @functools.cached_property
    def stats(self):
        """Mean and standard deviation of the pixels. Raises: UserError if no file says them."""
        if self.backbone_stats is not None:
            return self.backbone_stats
        return hub_stats(self.name.removeprefix(self.kind.prefix))

    def forward(self, pixels):
        if self.are_features(pixels):
            features = pixels.flatten(0, -2)                             # (B * T, width)
        else:
            features = self.frames(pixels)
        return self.pool(features, pixels)

    def are_features(self, pixels):
        """Whether these are features of this encoder, computed before."""
        return pixels.ndim < 4 and not self.kind.reads_files

    def frames(self, pixels):
        """Features of each frame, (B * T, width), or of each clip, (B, width).

        Video Swin returns those of fewer time steps than frames.
        """
        if self.kind.whole_clips:
            return self.body(pixels)
        if self.frame_features:
            return self.frame_features(self, pixels)
        frames = pixels
        if pixels.ndim == 5:
            frames = pixels.flatten(0, 1)                                # (B * T, 3, S, S)
        return self.body(frames)

    def pool(self, features, pixels):
        """Features of frames -> features (B, width) and embeddings (B, D) of images or clips."""
        embedding = self.projection(features)                            # (B * T, D)
        has_frames = pixels.ndim == 5
        if self.are_features(pixels):
            has_frames = pixels.ndim == 3
        if has_frames and not self.kind.whole_clips:
            B = len(pixels)
            features = features.unflatten(0, (B, -1)).mean(1)            # (B, width)
            embedding = F.normalize(embedding.float(), dim=-1)
            embedding = embedding.unflatten(0, (B, -1)).mean(1)          # (B, D)
        return features, embedding


def has_width(clip_projection, embed_dim):
    """Whether a CLIP's own projection is of width D, as wanted; False for None."""
    return clip_projection is not None and clip_projection.out_features == embed_dim


class TextEncoder(Encoder):
    """Token ids (B, L), or features (B, width) computed before -> embeddings (B, D).

    Args:
        name: "small", or a transformers id or folder.
        embed_dim: D; 0 = the model's own projection, or none if it has none.
        pretrained: read published weights.
        length: most tokens of a text, of the small encoder.
        vocabulary: number of tokens of the small encoder.
        pooling: "cls" or "mean" (a CLIP has its own), or "ssb", SSB's head.
        config: of a transformers model that is rebuilt, as a dict.
        projection_bias: whether a new projection has a bias.
        backbone: takes the place of that of the name.
    """

    def __init__(self, name, embed_dim, pretrained=True, length=32, vocabulary=0, *,
                 pooling="cls", projection_bias=False, config=None,
                 backbone=None):
        super().__init__()
        if backbone is None and name == "small":
            backbone = Backbone(SmallText(vocabulary, length), 128)
        elif backbone is None:
            backbone = hub_encoder(name, "text", pretrained, config)
        self.name = name
        self.body = backbone.body
        self.width = backbone.width
        self.config = backbone.config
        self.model_type = backbone.model_type
        self.is_clip = backbone.model_type.startswith("clip")
        self.pooling = pooling
        self.head = None
        if pooling == "ssb":
            from contrastive.encoders.ssb import TextHead

            self.head = TextHead(self.width, embed_dim)
        clip_projection = backbone.projection
        clip_dim = embed_dim
        if clip_projection is not None and not embed_dim:
            clip_dim = clip_projection.out_features
        if self.head:
            self.projection = nn.Identity()
        elif has_width(clip_projection, clip_dim):
            self.projection = clip_projection
        else:
            self.projection = projection_layer(self.width, embed_dim, projection_bias)

    def forward(self, input_ids=None, attention_mask=None, features=None):
        if features is None:
            _, features = self.states(input_ids, attention_mask)         # (B, width)
        return self.projection(features)

    def words(self, input_ids, attention_mask):
        """States of the tokens, (B, L, width), and embeddings of the texts, (B, D)."""
        states, features = self.states(input_ids, attention_mask)
        return states, self.projection(features)

    def states(self, input_ids, attention_mask):
        """States of the tokens, (B, L, width), and features of the texts, (B, width)."""
        if not self.model_type:
            states, pooled = self.body(input_ids, attention_mask)        # (B, L, width), (B, width)
        else:
            states, pooled = self.transformers_states(input_ids, attention_mask)
        if self.head:
            pooled = self.head(states, attention_mask)                   # (B, D)
        return states, pooled

    def transformers_states(self, input_ids, attention_mask):
        """States of the tokens and of the texts, (B, L, width) and (B, width)."""
        mask = attention_mask
        if self.is_clip:
            mask = None  # its attention is causal, and padding follows the end token
        elif self.model_type in ("bert", "distilbert", "t5"):
            mask = mask_of_body(self.body, attention_mask)
        output = self.body(input_ids=input_ids, attention_mask=mask)
        states = output.last_hidden_state
        if self.is_clip:
            pooled = output.pooler_output
        elif self.pooling == "mean":
            pooled = masked_mean(states, attention_mask)
        else:
            pooled = states[:, 0]
        return states, pooled
