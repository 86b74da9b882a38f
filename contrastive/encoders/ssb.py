"""SSB, the base of NCL's Table 4: its encoders and its captioner (variants/ncl_ssb.py).

Support-set bottlenecks for video-text representation learning (Patrick et al., ICLR 2021). There is
no public code, so this is a reconstruction. A word says where a value comes from: memory = the SSB
paper as remembered, not looked up; ours = our choice.
"""

from contrastive.core.processes import UserError, opening
from contrastive.encoders.base import Transformer, load_published, masked_mean
from contrastive.encoders.freezing import change_dropout

import torch
import torch.nn as nn
import torch.nn.functional as F


# ===================================================== encoders ===================================
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
        num_features: F, width of the features.
        width: of the output.
    """

    def __init__(self, num_features, width):
        super().__init__(width)
        self.gru = nn.GRU(num_features, width // 2, batch_first=True, bidirectional=True)

    def forward(self, x):
        """Features (B, T, F) -> (B, width)."""
        keep = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)  # (B, T)
        states, _ = self.gru(x)                                            # (B, T, width)
        return self.pool(states, keep)


def set_dropout(model, dropout, text=True):
    """Sets the dropout in training of SSB's encoders.

    Args:
        model: TwoTower.
        dropout: probability 0..1 in the video encoder and the text head.
        text: False switches off the dropout of T5, which otherwise keeps its own.
    """
    if not text:
        for module in model.text.body.modules():
            change_dropout(module, 0.0)
    model.vision.body.blocks.dropout = dropout
    model.text.head.blocks.dropout = dropout


# ===================================================== captioning =================================
class Captioner(nn.Module):
    """T5's decoder, which reads a linear map of z_i as its one encoder state (one is ours).

    Its word embeddings start as a copy of the text encoder's. It belongs to the loss and is not
    saved in a finished run's model.

    Args:
        text: the TextEncoder, a T5.
        dim: D, width of z.
        pretrained: start from published weights.
        dropout: keep T5's own dropout.
    Raises: UserError if the text encoder is no T5.
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
                t5 = load_published(T5ForConditionalGeneration, name, config)
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
