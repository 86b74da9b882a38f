"""SSB, the base of NCL's Table 4: its towers, its captioning loss and its recipe.

Support-set bottlenecks for video-text representation learning (Patrick et al., ICLR 2021): a text
tower over T5, a video tower over precomputed features, and a loss that generates each caption from
the other videos of the batch.

There is no public code, so this is a reconstruction, which may not reach the printed numbers. A
word beside each value says where it comes from: NCL = Sec. 4 and App. C of the NCL paper; memory =
the SSB paper as remembered, not looked up; ours = our choice.

Equations (c(x): x at unit length; S_i: the global batch without the rows of caption i's video)
    w_ij  = exp(<c(t_i), c(v_j)> / T) / sum_{k in S_i} exp(<c(t_i), c(v_k)> / T)
    z_i   = sum_{j in S_i} w_ij c(v_j)                                              support_summary
    L_cap = mean_i mean_l -log p(t_il | t_i1 .. t_i,l-1; z_i), p by T5's decoder    captioning_loss

Known differences from SSB: features of any length are resampled to --frames steps (nearest rows,
folder by folder), while SSB cuts at a number of seconds and masks; the word embeddings of T5's
encoder and decoder are not tied.
"""

from contrastive.core.metrics import normalize
from contrastive.core.processes import UserError, opening
from contrastive.encoders.base import Transformer, masked_mean, published

import torch
import torch.nn as nn
import torch.nn.functional as F

# ===================================================== recipe =====================================
# For every data set, in place of the script's own values.
RECIPE = dict(
    text_encoder="google-t5/t5-base", pretrained=True,                     # NCL
    text_pooling="ssb", embed_dim=1024,                                    # memory
    optimizer="adam", lr=5e-5, grad_clip=0.2, batch_size=64,               # memory
    weight_decay=1e-5,                                                     # memory, weak
    lr_schedule="constant", lr_end=5e-5,                                   # ours
    warmup_epochs=0.0, warmup_fraction=0.0, mixed_precision="no",          # ours
    beta1=0.9, beta2=0.999, eps=1e-8,                                      # Adam's own
    tau=0.07, learnable_tau=False,                                         # NCL
    # max-margin: the sum over the batch, as in VSE++'s code; it fits App. C's 15 (ours);
    # infonce: as NCL (ours)
    loss_scale={"ncl": 15.0, "infonce": 15.0, "max-margin": 64.0},
    captioning_weight=10.0,                                                # memory, weak
    support_tau=0.1,                                                       # ours: 1 is too even
    # memory, of MSR-VTT; that an epoch counts captions, not clips, is from the set's own recipe
    # (--unfold-captions): ours
    epochs=20.0, frames=32, text_length=100,
    # NCL; that T5 keeps its own 0.1 is ours
    dropout=0.1, text_dropout=True)
RECIPES = {
    "msrvtt": RECIPE,
    # ours: no value is remembered for MSVD
    "msvd": RECIPE | dict(frames=64),
    "activitynet": RECIPE | dict(
        epochs=28.0, frames=512, text_length=256,                          # memory
        # NCL; that this includes T5's is ours
        dropout=0.0, text_dropout=False)}


def ssb_recipe(chosen):
    """The defaults of --image-encoder ssb; those of MSR-VTT for a set that SSB and NCL did not use.

    Args: chosen: the flags recipe and loss.
    Returns: {flag: default}.
    """
    recipe = dict(RECIPES.get(chosen.recipe, RECIPE))
    recipe["loss_scale"] = recipe["loss_scale"].get(chosen.loss, 1.0)
    return recipe


# ===================================================== towers =====================================
class _Pooling(nn.Module):
    """Transformer pooling: two layers of four heads, and the mean of their outputs.

    The layers are from memory, of the authors' next paper; the mean is ours. It adds no positions,
    since its inputs already depend on the order. set_dropout sets its dropout.
    """

    def __init__(self, width):
        super().__init__()
        self.blocks = Transformer(width, layers=2, heads=4)
        self.norm = nn.LayerNorm(width)

    def pool(self, x, keep):
        """x (B, L, width), keep (B, L) bool, True at a step -> (B, width)."""
        return masked_mean(self.norm(self.blocks(x, keep)), keep)


class TextHead(_Pooling):
    """A convolution over the hidden states of a text encoder, then transformer pooling.

    The kernel of three words, the zero padding and the ReLU are ours.

    Args:
        words: width of the hidden states.
        width: of the output.
    """

    def __init__(self, words, width):
        super().__init__(width)
        self.conv = nn.Conv1d(words, width, kernel_size=3, padding=1)

    def forward(self, words, attention_mask):
        """Hidden states (B, L, words), mask (B, L) -> (B, width)."""
        keep = attention_mask.bool()                                       # (B, L)
        words = words * keep[..., None]                                    # (B, L, words)
        x = self.conv(words.transpose(1, 2))                               # (B, width, L)
        return self.pool(F.relu(x).transpose(1, 2), keep)


class VideoTower(_Pooling):
    """A GRU over features of T steps, motion and appearance side by side, then transformer pooling.

    That it runs in both directions, with half of the width each, is ours.

    Args:
        features: F, width of the features.
        width: of the output.
    """

    def __init__(self, features, width):
        super().__init__(width)
        self.gru = nn.GRU(features, width // 2, batch_first=True, bidirectional=True)

    def forward(self, x):
        """Features (B, T, F) -> (B, width)."""
        keep = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)  # (B, T)
        states, _ = self.gru(x)                                            # (B, T, width)
        return self.pool(states, keep)


# ===================================================== captioning =================================
class Captioner(nn.Module):
    """T5's decoder, which reads a linear map of z_i as its one encoder state (one is ours).

    Its word embeddings start as a copy of the text tower's. It belongs to the loss and is not saved
    in a finished run's model.

    Args:
        text: the TextEncoder of the text tower, a T5.
        dim: D, width of z.
        pretrained: start from published weights.
        dropout: keep T5's own dropout.
    Raises: UserError if the text tower is no T5.
    """

    def __init__(self, text, dim, pretrained=True, dropout=True):
        super().__init__()
        config = dict(text.config or {})
        if config.get("model_type") != "t5":
            raise UserError("--captioning-weight: the captioning loss needs the decoder of a T5, "
                            f"which --text-encoder {text.name} is not")
        if not dropout:
            config["dropout_rate"] = 0.0
        self.t5 = self.decoder(text.name, config, pretrained)
        # T5 starts a text with its padding
        self.start = config.get("decoder_start_token_id") or 0
        self.bridge = nn.Linear(dim, self.t5.config.d_model)

    @staticmethod
    def decoder(name, config, pretrained):
        """T5 without its encoder: the decoder and its output layer."""
        from transformers import AutoConfig, T5ForConditionalGeneration
        config = AutoConfig.for_model(**config)
        with opening(name):
            if pretrained:
                # it refuses the weights of an encoder alone
                t5 = published(T5ForConditionalGeneration, name, config)
            else:
                t5 = T5ForConditionalGeneration(config)
        del t5.encoder, t5.shared
        if not config.scale_decoder_outputs:
            # T5 1.1 has output weights of its own: they may not share memory with the words
            weight = t5.lm_head.weight.detach().clone()                    # (V, d_model)
            t5.lm_head.weight = nn.Parameter(weight)
        return t5

    def forward(self, z, ids):
        """z (B, D), ids (B, L) -> logits (B, L, V); position l sees the ids before it."""
        inputs = F.pad(ids[:, :-1], (1, 0), value=self.start)              # (B, L)
        state = self.bridge(z)[:, None]                                    # (B, 1, d_model)
        output = self.t5(encoder_outputs=(state,), decoder_input_ids=inputs, use_cache=False)
        return output.logits                                               # (B, L, V)


def support_summary(text, videos, video_id, video_ids, tau=0.1):
    """z_i, the summary of caption i by the other videos; gradients reach both towers.

    Args:
        text: (B, D) captions of this process.
        videos: (N, D) of the global batch.
        video_id: (B,) long, the video of each caption.
        video_ids: (N,) long, of the global batch.
        tau: temperature T > 0, divides the cosine.
    Returns: (B, D); zeros for a caption if the batch holds no other video.
    """
    text, videos = normalize(text), normalize(videos)                      # (B, D), (N, D)
    in_support = video_id[:, None] != video_ids                            # (B, N) S_i
    logits = text @ videos.T / tau                                         # (B, N)
    lowest = torch.finfo(logits.dtype).min
    weights = logits.masked_fill(~in_support, lowest).softmax(1)           # (B, N)
    # zeros where there is no support at all
    weights = weights * in_support                                         # (B, N)
    return weights @ videos                                                # (B, D)


def captioning_loss(z, input_ids, attention_mask, decoder):
    """L_cap: the loss of generating each caption from the summary of its support set.

    The mean over a caption's tokens is ours (memory: the paper has their sum): with it, 10 times
    this loss is about as large as the other loss.

    Args:
        z: (B, D) summaries.
        input_ids, attention_mask: (B, L) tokens of the captions, padded at the end.
        decoder: a Captioner, or any function (z, ids) -> logits (B, L, V) in which position l sees
            only the ids before it.
    Returns: () mean over the captions of this process. A random guess is ln V.
    """
    logits = decoder(z, input_ids).transpose(1, 2)                         # (B, V, L)
    nll = F.cross_entropy(logits, input_ids, reduction="none")             # (B, L)
    per_caption = (nll * attention_mask).sum(1) / attention_mask.sum(1)    # (B,)
    return per_caption.mean()                                              # ()
