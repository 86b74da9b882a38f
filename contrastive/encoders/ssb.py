"""SSB, the base of NCL's Table 4: Support-set bottlenecks for video-text representation learning (Patrick et al., ICLR
2021). Its two towers over T5 and over precomputed features, its captioning loss, and its recipe.

There is no public code, so this is a reconstruction, which may not reach the printed numbers. A word beside each value
says where it comes from: NCL = Sec. 4 and App. C of the NCL paper; memory = the SSB paper as remembered, not looked up;
ours = our choice. Equations, with c() of unit length and S_i the global batch without the rows of caption i's video:
    w_ij  = exp(<c(t_i), c(v_j)> / T) / sum_{k in S_i} exp(<c(t_i), c(v_k)> / T)
    z_i   = sum_{j in S_i} w_ij c(v_j)                                                     support_summary
    L_cap = mean_i mean_l -log p(t_il | t_i1 .. t_i,l-1; z_i), p by T5's decoder           captioning_loss

Known differences from SSB: features of any length are resampled to --frames steps (nearest rows, folder by folder),
while SSB cuts at a number of seconds and masks; the word embeddings of T5's encoder and decoder are not tied.
"""

from contrastive.encoders.base import Transformer, masked_mean, published
from contrastive.engine.processes import UserError, opening
from contrastive.evaluation.metrics import normalize

import torch
import torch.nn as nn
import torch.nn.functional as F

# ======================================================= recipe ======================================================
RECIPE = dict(  # for every data set, instead of the script's own values
    text_encoder="google-t5/t5-base", pretrained=True,                     # NCL
    text_pooling="ssb", embed_dim=1024,                                    # memory
    optimizer="adam", lr=5e-5, grad_clip=0.2, batch_size=64,               # memory
    weight_decay=1e-5,                                                     # memory, weak
    lr_schedule="constant", lr_end=5e-5, warmup_epochs=0.0, warmup_fraction=0.0, mixed_precision="no",  # ours
    beta1=0.9, beta2=0.999, eps=1e-8,                                      # Adam's own
    tau=0.07, learnable_tau=False,                                         # NCL
    # max-margin: the sum over the batch, as in VSE++'s code; it fits App. C's 15 (ours); infonce as NCL (ours)
    loss_scale={"ncl": 15.0, "infonce": 15.0, "max-margin": 64.0},
    captioning_weight=10.0,                                                # memory, weak; beside NCL's loss: ours
    support_tau=0.1,                                                       # ours: at 1 all videos weigh about alike
    epochs=20.0, frames=32, text_length=100,                               # memory, of MSR-VTT; that an epoch counts
    # captions, not clips, is from the set's own recipe (--unfold-captions): ours
    dropout=0.1, text_dropout=True)                                        # NCL; that T5 keeps its own 0.1 is ours
RECIPES = {
    "msrvtt": RECIPE,
    "msvd": RECIPE | dict(frames=64),                                      # all ours: no value is remembered for MSVD
    "activitynet": RECIPE | dict(
        epochs=28.0, frames=512, text_length=256,                          # memory
        dropout=0.0, text_dropout=False)}                                  # NCL; that this includes T5's is ours


def ssb_recipe(chosen):
    """{flag: default} for --image-encoder ssb; MSR-VTT's, if SSB and NCL did not use the set. chosen: the flags recipe
    and loss."""
    recipe = RECIPES.get(chosen.recipe, RECIPE)
    return recipe | dict(loss_scale=recipe["loss_scale"].get(chosen.loss, 1.0))


# ======================================================= towers ======================================================
class _Pooling(nn.Module):
    """Transformer pooling: two layers of four heads (memory, of the authors' next paper) and the mean of their outputs
    (ours). It adds no positions, since its inputs already depend on the order. dropout: see set_dropout."""

    def __init__(self, width):
        super().__init__()
        self.blocks, self.norm = Transformer(width, layers=2, heads=4), nn.LayerNorm(width)

    def pool(self, x, keep):
        """x (B, L, width), keep (B, L) bool, True at a step -> (B, width)."""
        return masked_mean(self.norm(self.blocks(x, keep)), keep)


class TextHead(_Pooling):
    """A convolution over the hidden states of a text encoder, then transformer pooling: (B, L, words) -> (B, width).
    The kernel of three words, zero padding and ReLU are ours."""

    def __init__(self, words, width):
        super().__init__(width)
        self.conv = nn.Conv1d(words, width, kernel_size=3, padding=1)

    def forward(self, words, attention_mask):
        keep = attention_mask.bool()                                       # (B, L)
        words = (words * keep[..., None]).transpose(1, 2)                  # (B, words, L); 0 at padding
        return self.pool(F.relu(self.conv(words)).transpose(1, 2), keep)


class VideoTower(_Pooling):
    """A GRU over features of T steps (motion and appearance side by side), then transformer pooling: (B, T, F) ->
    (B, width). That it runs in both directions, with half the width each, is ours."""

    def __init__(self, features, width):
        super().__init__(width)
        self.gru = nn.GRU(features, width // 2, batch_first=True, bidirectional=True)

    def forward(self, x):
        keep = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)  # (B, T)
        return self.pool(self.gru(x)[0], keep)


# =================================================== cross-captioning ================================================
class Captioner(nn.Module):
    """T5's decoder, which reads a linear map of z_i as its one encoder state (one is ours): z (B, D), ids (B, L) ->
    logits (B, L, V). Its word embeddings start as a copy of the text tower's. It belongs to the loss and is not saved
    in a finished run's model. Args: text: the TextEncoder, a T5; dropout: keep T5's own.   Raises: UserError."""

    def __init__(self, text, dim, pretrained=True, dropout=True):
        super().__init__()
        if (text.config or {}).get("model_type") != "t5":
            raise UserError(f"--captioning-weight: the decoder of a T5, which --text-encoder {text.name} is not")
        from transformers import AutoConfig, T5ForConditionalGeneration
        config = AutoConfig.for_model(**text.config | ({} if dropout else {"dropout_rate": 0.0}))
        with opening(text.name):                                           # of an encoder alone `published` lacks half
            self.t5 = (published(T5ForConditionalGeneration, text.name, config) if pretrained else
                       T5ForConditionalGeneration(config))
        del self.t5.encoder, self.t5.shared                                # keep the decoder and its output
        if not config.scale_decoder_outputs:                               # T5 1.1, which has output weights of its own
            self.t5.lm_head.weight = nn.Parameter(self.t5.lm_head.weight.detach().clone())           # (V, d_model)
        self.start = text.config.get("decoder_start_token_id") or 0        # T5: its padding
        self.bridge = nn.Linear(dim, config.d_model)

    def forward(self, z, ids):
        before = F.pad(ids[:, :-1], (1, 0), value=self.start)              # (B, L) teacher forcing
        state = (self.bridge(z)[:, None],)                                 # (B, 1, d_model)
        return self.t5(encoder_outputs=state, decoder_input_ids=before, use_cache=False).logits


def support_summary(text, videos, video_id, video_ids, tau=0.1):
    """z_i, the summary of caption i by the other videos; gradients reach both towers.

    Args:
        text (B, D), video_id (B,) long: the captions of this process, and the video of each.
        videos (N, D), video_ids (N,) long: of the global batch.   tau: T, divides the cosine, > 0.
    Returns: (B, D); zeros for a caption if the batch holds no other video.
    """
    text, videos = normalize(text), normalize(videos)                      # (B, D), (N, D)
    others = video_id[:, None] != video_ids                                # (B, N) S_i: no row of the own video
    logits = text @ videos.T / tau                                         # (B, N)
    weights = logits.masked_fill(~others, torch.finfo(logits.dtype).min).softmax(1) * others         # (B, N)
    return weights @ videos


def captioning_loss(z, input_ids, attention_mask, decoder):
    """L_cap: each caption from the summary z (B, D) of its support set.

    Args:
        input_ids, attention_mask: (B, L) tokens of the captions, padded at the end.
        decoder: a Captioner, or any function (z, ids) -> logits (B, L, V) where position l sees only the ids before it.
    Returns: scalar, mean over the B captions of this process; a random guess is ln V. The mean over a caption's tokens
        is ours (memory: the paper has their sum): with it, 10 times this loss is about as large as the other loss.
    """
    nll = F.cross_entropy(decoder(z, input_ids).transpose(1, 2), input_ids, reduction="none")        # (B, L)
    return ((nll * attention_mask).sum(1) / attention_mask.sum(1)).mean()
