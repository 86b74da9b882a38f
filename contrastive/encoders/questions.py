"""The model that answers questions about videos, in VIOLET's way: a transformer over frames and words (MAMA)."""

import math

from contrastive.encoders.base import Transformer, TwoTower
from contrastive.engine.processes import gather, positive_index
from contrastive.evaluation.metrics import normalize

import torch
import torch.nn as nn


class QuestionAnswerer(TwoTower):
    """Videos and questions -> scores of answers.

    Args:
        vision, text: the towers.
        answers: the vocabulary of open questions, most frequent first; [] = questions with choices.
        layers: of the fusion.   frames: the most frames that a clip may have.
        similarity: how videos are compared with texts: 'pooled', before the fusion; 'fused', by a pass through it; or
            'none', by no loss.
    """
    by_rows = staticmethod(lambda function, *rows, columns: function(*rows))  # a script's, which cuts them into blocks

    def __init__(self, vision, text, answers=(), model="fusion", layers=2, frames=1, similarity="pooled"):
        super().__init__(vision, text)
        self.answers, self.model, self.similarity, width = list(answers), model, similarity, text.width
        self.frame = nn.Linear(vision.width, width)
        self.place = nn.Parameter(torch.randn(1 + frames, width) * 0.02)   # of [CLS] and of each frame
        self.fusion = Transformer(width, layers, next(h for h in (12, 8, 4, 2, 1) if width % h == 0))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, max(1, len(self.answers)))
        if similarity == "fused":
            self.pair = nn.Parameter(torch.randn(2, width) * 0.02)
            vision.projection.requires_grad_(False)                        # no loss uses them: DDP would wait for them
            text.projection.requires_grad_(False)

    def forward(self, pixels=None, tokens=None, question=None, choices=None):
        """pixels (B, [T,] 3, S, S); tokens (B, L) of the texts paired with them, None in evaluation; question: tokens
        (B, L); choices: tokens (B, C, L) of "question choice", and `there` (B, C), False for a choice that is missing.

        Returns: video (B, D), text (B, D), scores (B, A) of the vocabulary or (B, C) of choices, -inf for a missing
            one; without a question what TwoTower returns. With fused similarity and tokens, video and text are instead
            the cosines (B, N) with all texts and all videos of the global batch: see `cosines`.
        """
        if question is None:
            return super().forward(pixels, tokens)
        frames = self.vision.frames(pixels)                                # (B * T, width)
        _, video = self.vision.pool(frames, pixels)                        # (B, D)
        frames = frames.unflatten(0, (len(pixels), -1))                    # (B, T, width)
        paired = None
        if tokens is not None and self.similarity == "fused":
            video, paired = self.cosines(frames, *self.text.words(**tokens)[:1], tokens["attention_mask"])
        elif tokens is not None:
            paired = self.text(**tokens)                                   # (B, D)
        if self.answers:
            words, _ = self.text.words(**question)                         # (B, L, W)
            first = self.fuse(self.place[:1], frames, words, question["attention_mask"])                 # (B, 1, W)
            return video, paired, self.head(first[:, 0])                   # (B, A)
        choices = choices or {k: v[:, None] for k, v in question.items()}  # one choice: the question itself
        B, C = choices["input_ids"].shape[:2]
        flat = {k: choices[k].flatten(0, 1) for k in ("input_ids", "attention_mask")}                    # (B * C, L)
        words, _ = self.text.words(**flat)                                 # (B * C, L, W)
        each = frames.repeat_interleave(C, 0)                              # (B * C, T, width)
        scores = self.head(self.fuse(self.place[:1], each, words, flat["attention_mask"])).view(B, C)
        there = choices.get("there")
        return video, paired, scores if there is None else scores.masked_fill(~there, -math.inf)

    def fuse(self, first, frames, words, keep):
        """Output (b, f, W) of the transformer at tokens `first` (f, W), which precede the frames (b, T, width) of a
        clip and words (b, L, W); keep (b, L) is 0 at padding."""
        b, T = frames.shape[:2]
        first = first.expand(b, -1, -1)                                    # (b, f, W)
        x = torch.cat([first, self.frame(frames) + self.place[1:1 + T], words], 1)   # (b, f + T + L, W)
        keep = torch.cat([keep.new_ones(b, first.shape[1] + T), keep], 1).bool()     # (b, f + T + L)
        return self.norm(self.fusion(x, keep, first.shape[1]))

    def cosines(self, frames, words, keep):
        """Cosines of all pairs of the global batch, each by a pass through the fusion.

        Args: frames (B, T, width), words (B, L, W), keep (B, L): of this process; row i of each is one pair.
        Returns: (B, N) its videos with all texts, (B, N) its texts with all videos. Each process fuses B * N pairs,
            those of its own texts (all clips have T frames, while the texts of other processes may be longer).
        """
        videos = gather(frames)                                            # (N, T, width)
        N, length = len(videos), 2 + frames.shape[1] + words.shape[1]

        def rows(words, keep):                                             # b texts at a time
            each = videos.repeat(len(words), 1, 1)                         # (b * N, T, width)
            pairs = self.fuse(self.pair, each, words.repeat_interleave(N, 0), keep.repeat_interleave(N, 0))
            video, text = normalize(pairs).unbind(1)                       # (b * N, W) each
            return (video * text).sum(1).view(-1, N)                       # (b, N)
        size = N * len(self.fusion) * length * words.shape[2]              # numbers in one activation of a text's pairs
        texts = self.by_rows(rows, words, keep, columns=size)                               # (B, N)
        return gather(texts)[:, positive_index(texts)].T, texts
