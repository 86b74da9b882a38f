"""SSB, the base of NCL's Table 4: Support-set bottlenecks for video-text representation learning (Patrick et al., ICLR
2021). Its two towers over T5 and over precomputed features, its captioning loss, and its recipe.

There is no public code, so this is a reconstruction, and the printed numbers are not promised. Where a value comes from
is said beside it: NCL = Sec. 4 and App. C of the NCL paper; memory = of the SSB paper, not looked up; ours = known from
nowhere. Equations, with c() of unit length and S_i the global batch without all rows of the video of caption i:
    w_ij  = exp(<c(t_i), c(v_j)> / T) / sum_{k in S_i} exp(<c(t_i), c(v_k)> / T)
    z_i   = sum_{j in S_i} w_ij c(v_j)                                                     support_summary
    L_cap = mean_i mean_l -log p(t_il | t_i1 .. t_i,l-1; z_i), p by T5's decoder           captioning_loss

Known differences from SSB: features of any length are brought to --frames steps, each folder by its nearest rows, where
SSB cuts at so many seconds and masks; the word embeddings of T5's encoder and decoder start alike and then part.
"""

from engine.base import UserError, hub_reason

import torch
import torch.nn as nn
import torch.nn.functional as F

from encoders.base import Transformer
from evaluation.metrics import normalize

# ======================================================= recipe ======================================================
RECIPE = dict(  # of every data set, instead of the script's own values
    text_encoder="google-t5/t5-base", pretrained=True,                     # NCL
    text_pooling="ssb", embed_dim=1024,                                    # memory
    optimizer="adam", lr=5e-5, grad_clip=0.2, batch_size=64,               # memory
    weight_decay=1e-5,                                                     # memory, weak
    lr_schedule="constant", lr_end=5e-5, warmup_epochs=0.0,                # ours
    beta1=0.9, beta2=0.999, eps=1e-8,                                      # Adam's own
    tau=0.07, learnable_tau=False,                                         # NCL
    # the sum over the batch, as in the code of VSE++, to which App. C's 15 fits (ours); infonce as NCL (ours)
    loss_scale={"ncl": 15.0, "infonce": 15.0, "max-margin": 64.0},
    captioning_weight=10.0,                                                # memory, weak; beside NCL's loss: ours
    support_tau=0.1,                                                       # ours: at 1 unit vectors all weigh the same
    epochs=20.0, frames=32, text_length=100,                               # memory, of MSR-VTT; of captions, not clips,
    # as the set's own recipe has it (--unfold-captions): ours
    dropout=0.1, text_dropout=True)                                        # NCL; that T5's own 0.1 stays is ours
RECIPES = {
    "msrvtt": RECIPE,
    "msvd": RECIPE | dict(frames=64),                                      # all ours: nothing is recalled of MSVD
    "activitynet": RECIPE | dict(
        epochs=28.0, frames=512, text_length=256,                          # memory
        dropout=0.0, text_dropout=False)}                                  # NCL; that it means T5's, too, is ours


def feature_recipe(chosen, published):
    """{flag: default} of --image-encoder ssb, where a set that SSB and NCL did not use takes MSR-VTT's, or features, in
    the manner of SSB.

    Args: chosen: the flags image_encoder, dataset and loss.   published: the set's own recipe has pretrained towers."""
    if chosen.image_encoder == "ssb":
        recipe = RECIPES.get(chosen.dataset, RECIPE)
        return recipe | dict(loss_scale=recipe["loss_scale"].get(chosen.loss, 1.0))
    text = dict(text_encoder="t5-base", text_pooling="mean", lr=1e-4) if published else {}           # the rate is ours
    return text | dict(tau=0.07, learnable_tau=False, loss_scale=15.0 if chosen.loss == "ncl" else 1.0,      # NCL
                       dropout=0.1 if chosen.dataset in ("msvd", "msrvtt") else 0.0)                 # NCL


def feature_words(args):
    """What the banner says of these towers."""
    if args.image_encoder == "ssb":
        return {"recipe": f"{args.dataset} (reconstruction of SSB; encoders/ssb.py says which values are from memory)"}
    own = "keeps its own" if args.text_dropout and args.text_encoder != "small" else "has none"
    return {"features": "towers in the manner of SSB, without its captioning loss and its epochs, batch and decay; "
                        f"dropout {args.dropout:g}, {args.text_encoder} {own}"}


# ======================================================= towers ======================================================
class _Pooling(nn.Module):
    """Transformer pooling: two layers of four heads (memory, of the authors' next paper) and the mean of what they make
    (ours), without positions: what comes before knows the order. dropout: set in `blocks`, see set_dropout."""

    def __init__(self, width):
        super().__init__()
        if width < 4 or width % 4:
            raise UserError(f"--embed-dim {width}: SSB's towers are as wide and have four heads; use a multiple of 4")
        self.blocks, self.norm = Transformer(width, layers=2, heads=4), nn.LayerNorm(width)

    def pool(self, x, keep):
        """x (B, L, width), keep (B, L) bool, True at a step -> (B, width)."""
        x = self.norm(self.blocks(self.blocks.drop(x), keep))              # (B, L, width)
        return (x * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)


class TextHead(_Pooling):
    """Hidden states of a text encoder, one convolution over neighbours, transformer pooling: (B, L, words) ->
    (B, width). Three words, zeros beyond the ends and ReLU are ours."""

    def __init__(self, words, width):
        super().__init__(width)
        self.conv = nn.Conv1d(words, width, kernel_size=3, padding=1)

    def forward(self, words, attention_mask):
        keep = attention_mask.bool()                                       # (B, L)
        words = (words * keep[..., None]).transpose(1, 2)                  # (B, words, L); nothing of the padding
        return self.pool(F.relu(self.conv(words)).transpose(1, 2), keep)


class VideoTower(_Pooling):
    """Features of T steps (motion and appearance side by side), a GRU, transformer pooling: (B, T, F) -> (B, width).
    Both directions, half the width each, are ours."""

    def __init__(self, features, width):
        super().__init__(width)
        self.gru = nn.GRU(features, width // 2, batch_first=True, bidirectional=True)

    def forward(self, x):
        if x.shape[2] != self.gru.input_size:
            raise UserError(f"--feature-dir: features of width {x.shape[2]}, the model was trained on "
                            f"{self.gru.input_size}; give the same folders in the same order")
        keep = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)  # (B, T)
        return self.pool(self.gru(x)[0], keep)


# =================================================== cross-captioning ================================================
class Captioner(nn.Module):
    """T5's decoder over one state, a linear map of z_i (one state is ours): z (B, D), ids (B, L) -> logits (B, L, V).

    Its word embeddings start as those of the text tower and are then its own. It belongs to the loss: a finished run's
    model has none. Args: text: the TextEncoder, a T5; dropout: keep T5's own.   Raises: UserError."""

    def __init__(self, text, dim, pretrained=True, dropout=True):
        super().__init__()
        if (text.config or {}).get("model_type") != "t5":
            raise UserError(f"--captioning-weight: a T5's decoder writes the captions, and --text-encoder {text.name} "
                            "is none; use google-t5/t5-base, or --captioning-weight 0")
        from transformers import AutoConfig, T5ForConditionalGeneration
        config = AutoConfig.for_model(**text.config | ({} if dropout else {"dropout_rate": 0.0}))
        try:
            self.t5, found = (T5ForConditionalGeneration.from_pretrained(
                text.name, config=config, dtype=torch.float32, output_loading_info=True)
                if pretrained else (T5ForConditionalGeneration(config), {"missing_keys": ()}))
        except Exception as error:
            raise UserError(f"--text-encoder {text.name}: {hub_reason(error)}") from error
        if any(name.startswith("decoder.block.") for name in found["missing_keys"]):     # would be random, unsaid
            raise UserError(f"--captioning-weight: --text-encoder {text.name} is a T5's encoder without its decoder; "
                            "use google-t5/t5-base, or --captioning-weight 0")
        del self.t5.encoder, self.t5.shared                                # the decoder and its output stay
        if not config.scale_decoder_outputs:                               # T5 1.1, which has output weights of its own
            self.t5.lm_head.weight = nn.Parameter(self.t5.lm_head.weight.detach().clone())           # (V, d_model)
        self.start = text.config.get("decoder_start_token_id") or 0        # T5: its padding
        self.bridge = nn.Linear(dim, config.d_model)

    def forward(self, z, ids):
        before = F.pad(ids[:, :-1], (1, 0), value=self.start)              # (B, L) teacher forcing
        state = (self.bridge(z)[:, None],)                                 # (B, 1, d_model)
        return self.t5(encoder_outputs=state, decoder_input_ids=before, use_cache=False).logits


def support_summary(text, videos, video_id, video_ids, tau=0.1):
    """z_i, what the other videos say of caption i; gradients reach both towers.

    Args:
        text (B, D), video_id (B,) long: the captions of this process, and of which video each is.
        videos (N, D), video_ids (N,) long: of the global batch.   tau: T, divides the cosine, > 0.
    Returns: (B, D); zeros for a caption whose video has the batch to itself.
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
        decoder: a Captioner, or any function (z, ids) -> logits (B, L, V) where place l knows the ids before it alone.
    Returns: scalar, mean over the B captions of this process; a random guess is ln V. The mean over the tokens of a
        caption is ours (the paper has their sum, from memory): it brings a weight of 10 to the size of the other loss.
    """
    nll = F.cross_entropy(decoder(z, input_ids).transpose(1, 2), input_ids, reduction="none")        # (B, L)
    return ((nll * attention_mask).sum(1) / attention_mask.sum(1)).mean()
