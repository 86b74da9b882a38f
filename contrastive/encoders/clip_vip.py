"""CLIP-ViP's video tower (Xue et al., ICLR 2023) and its released weights.

CLIP's vision transformer reads all frames of a clip at once: the L patches of each of T frames, and M = 1 + 3 video
proxy tokens, namely CLIP's class token and three new ones. Each patch gets the embedding of its position, as in an
image, and of its frame. Proxies attend to everything; a patch attends only to the proxies and to its own frame. Frames
thus exchange information through the proxies, at a cost that grows with T and not T^2. The class token after the last
layer is the feature of the clip. An image is a clip of one frame. The text tower is CLIP's; mama.py has the command.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

PROXIES, TIMES = 3, 12  # of the released weights: proxies beside the class token, frames of the temporal embedding


class ClipViP(nn.Module):
    """Clips (B, T, 3, S, S) or images (B, 3, S, S) -> the class token, (B, width).

    Args: clip: the vision transformer of a transformers CLIP; its weights are used in place.
        proxies: proxy tokens beside the class token.   times: rows of the temporal embedding; for other numbers
        of frames it is interpolated linearly, as in the authors' code.
    """

    def __init__(self, clip, proxies=PROXIES, times=TIMES):
        super().__init__()
        self.clip, width = clip, clip.config.hidden_size
        self.added_cls = nn.Parameter(torch.randn(proxies, width))         # (M - 1, width), the authors' init
        self.temporal = nn.Parameter(torch.zeros(times, width))

    def embed(self, pixels):
        """(B, M + T * L, width): the proxies, then the patches frame by frame; and M, T."""
        clips = pixels if pixels.ndim == 5 else pixels[:, None]            # (B, T, 3, S, S)
        B, T = clips.shape[:2]
        known = self.clip.embeddings
        place = known.position_embedding.weight                            # (1 + L, width)
        patches = known.patch_embedding(clips.flatten(0, 1)).flatten(2).transpose(1, 2)  # (B * T, L, width)
        patches = patches.reshape(B, T, len(place) - 1, place.shape[1])
        time = self.temporal                                               # (T, width)
        if T != len(time):
            time = F.interpolate(time.T[None], T, mode="linear")[0].T
        patches = patches + place[1:] + time[:, None]                      # (B, T, L, width)
        proxies = torch.cat([known.class_embedding[None], self.added_cls]) + place[:1]                   # (M, width)
        return torch.cat([proxies.expand(B, -1, -1), patches.flatten(1, 2)], 1), len(proxies), T

    def forward(self, pixels):
        x, M, T = self.embed(pixels)
        x = self.clip.pre_layrnorm(x)                                      # (B, M + T * L, width)
        for layer in self.clip.encoder.layers:
            x = x + attend(layer.self_attn, layer.layer_norm1(x), M, T)
            x = x + layer.mlp(layer.layer_norm2(x))
        return self.clip.post_layernorm(x[:, 0])                           # (B, width)


def attend(attention, x, M, T):
    """CLIP's self-attention over M proxies and T frames of L patches: x (B, M + T * L, width) -> the same shape.

    Proxies attend to all, a patch to the proxies and its own frame: two dense attentions, without a mask."""
    B, drop = len(x), attention.dropout if attention.training else 0.0
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    q, k, v = (p(x).unflatten(2, (attention.num_heads, -1)).transpose(1, 2) for p in projections)  # (B, H, M + T L, d)

    def frames(y):                                                         # (B * T, H, L, d), the patches of each
        return y[:, :, M:].unflatten(2, (T, -1)).transpose(1, 2).flatten(0, 1)

    def beside(y):                                                         # (B * T, H, M + L, d), proxies before them
        return torch.cat([y[:, :, :M].repeat_interleave(T, 0), frames(y)], 2)
    proxies = F.scaled_dot_product_attention(q[:, :, :M], k, v, dropout_p=drop)                    # (B, H, M, d)
    patches = F.scaled_dot_product_attention(frames(q), beside(k), beside(v), dropout_p=drop)      # (B * T, H, L, d)
    patches = patches.unflatten(0, (B, T)).transpose(1, 2).flatten(2, 3)   # (B, H, T * L, d)
    return attention.out_proj(torch.cat([proxies, patches], 2).transpose(1, 2).flatten(2))


def of_clip_vip(_, weights):
    """{our name: tensor} of CLIP-ViP's state dict, {its name: tensor} without `clipmodel.` in front."""
    towers = {"vision_model": "vision.body.clip", "text_model": "text.body", "visual_projection": "vision.projection",
              "text_projection": "text.projection"}
    out = {}
    for name, x in weights.items():
        tower, _, rest = name.partition(".")
        out[f"{towers.get(tower, tower)}.{rest}"] = x
    out["vision.body.added_cls"] = out.pop("vision.body.clip.embeddings.added_cls")
    out["vision.body.temporal"] = out.pop("vision.body.clip.embeddings.temporal_embedding")[0]  # (times, width)
    return out
