"""CLIP-ViP's video tower (Xue et al., ICLR 2023) and the names in its released weights.

CLIP's vision transformer reads all frames of a clip at once: the L patches of each of T frames, and
M = 1 + 3 video proxy tokens, which are CLIP's class token and three new ones. Each patch gets the
embedding of its position, as in an image, and of its frame. Proxies attend to everything; a patch
attends only to the proxies and to its own frame. Frames thus exchange information through the
proxies, at a cost that grows with T and not with T^2. The class token after the last layer is the
feature of the clip. An image is a clip of one frame. The text tower is CLIP's; mama.py has the
command.
"""

from contrastive.encoders.base import as_clips

import torch
import torch.nn as nn
import torch.nn.functional as F

NUM_PROXIES = 3   # proxy tokens of the released weights, beside the class token
NUM_FRAMES = 12   # frames of their temporal embedding

# Modules of CLIP-ViP -> ours.
MODULE_NAMES = {
    "vision_model": "vision.body.clip",
    "text_model": "text.body",
    "visual_projection": "vision.projection",
    "text_projection": "text.projection",
}


class ClipViP(nn.Module):
    """Clips (B, T, 3, S, S) or images (B, 3, S, S) -> the class token, (B, width).

    Args:
        clip: the vision transformer of a transformers CLIP, whose weights are used in place.
        proxies: number of proxy tokens beside the class token.
        times: number of frames of the temporal embedding. For clips with another number of frames
            it is interpolated linearly, as in the authors' code.
    """

    def __init__(self, clip, proxies=NUM_PROXIES, times=NUM_FRAMES):
        super().__init__()
        width = clip.config.hidden_size
        self.clip = clip
        self.added_cls = nn.Parameter(torch.randn(proxies, width))       # the authors' init
        self.temporal = nn.Parameter(torch.zeros(times, width))

    def embed(self, pixels):
        """The tokens (B, M + T * L, width), proxies first, then the patches frame by frame; M; T.
        """
        clips = as_clips(pixels)                                         # (B, T, 3, S, S)
        B, T = clips.shape[:2]
        embeddings = self.clip.embeddings
        position = embeddings.position_embedding.weight                  # (1 + L, width)
        patches = embeddings.patch_embedding(clips.flatten(0, 1))        # (B * T, width, S', S')
        patches = patches.flatten(2).transpose(1, 2)                     # (B * T, L, width)
        patches = patches.reshape(B, T, len(position) - 1, position.shape[1])
        temporal = self.temporal                                         # (T, width)
        if len(temporal) != T:
            temporal = F.interpolate(temporal.T[None], T, mode="linear")[0].T
        patches = patches + position[1:] + temporal[:, None]             # (B, T, L, width)
        proxies = torch.cat([embeddings.class_embedding[None], self.added_cls])
        proxies = proxies + position[:1]                                 # (M, width)
        M = len(proxies)
        proxies = proxies.expand(B, -1, -1)                              # (B, M, width)
        return torch.cat([proxies, patches.flatten(1, 2)], 1), M, T

    def forward(self, pixels):
        x, M, T = self.embed(pixels)
        x = self.clip.pre_layrnorm(x)                                    # (B, M + T * L, width)
        for layer in self.clip.encoder.layers:
            x = x + attend(layer.self_attn, layer.layer_norm1(x), M, T)
            x = x + layer.mlp(layer.layer_norm2(x))
        return self.clip.post_layernorm(x[:, 0])                         # (B, width)


def attend(attention, x, M, T):
    """CLIP's self-attention over M proxies and T frames of L patches each.

    Proxies attend to everything, a patch to the proxies and to its own frame: these are two dense
    attentions, which need no mask.

    Args:
        attention: the attention module of a transformers CLIP.
        x: (B, M + T * L, width).

    Returns: (B, M + T * L, width).
    """
    B = len(x)
    dropout = 0.0
    if attention.training:
        dropout = attention.dropout

    def split_heads(y):
        return y.unflatten(2, (attention.num_heads, -1)).transpose(1, 2)

    q = split_heads(attention.q_proj(x))                                 # (B, H, M + T * L, d)
    k = split_heads(attention.k_proj(x))
    v = split_heads(attention.v_proj(x))

    def patches_of_frames(y):
        return y[:, :, M:].unflatten(2, (T, -1)).transpose(1, 2).flatten(0, 1)

    def proxies_and_patches(y):
        proxies = y[:, :, :M].repeat_interleave(T, 0)                    # (B * T, H, M, d)
        return torch.cat([proxies, patches_of_frames(y)], 2)             # (B * T, H, M + L, d)

    proxies = F.scaled_dot_product_attention(q[:, :, :M], k, v, dropout_p=dropout)  # (B, H, M, d)
    patches = F.scaled_dot_product_attention(                            # (B * T, H, L, d)
        patches_of_frames(q), proxies_and_patches(k), proxies_and_patches(v), dropout_p=dropout)
    patches = patches.unflatten(0, (B, T)).transpose(1, 2).flatten(2, 3)  # (B, H, T * L, d)
    tokens = torch.cat([proxies, patches], 2)                            # (B, H, M + T * L, d)
    return attention.out_proj(tokens.transpose(1, 2).flatten(2))


def convert_clip_vip(weights):
    """The released tensors of CLIP-ViP by our names.

    Args:
        weights: {name: tensor} of the released file, without `clipmodel.` in front.

    Returns: {our name: tensor}.
    """
    tensors = {}
    for name, tensor in weights.items():
        module, _, parameter = name.partition(".")
        if not parameter.endswith("position_ids"):
            tensors[f"{MODULE_NAMES.get(module, module)}.{parameter}"] = tensor
    start = "vision.body.clip.embeddings"
    temporal = tensors.pop(f"{start}.temporal_embedding")                # (1, times, width)
    tensors["vision.body.added_cls"] = tensors.pop(f"{start}.added_cls")
    tensors["vision.body.temporal"] = temporal[0]
    return tensors
