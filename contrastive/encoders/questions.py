"""The model of MAMA that answers questions about videos in VIOLET's way."""

import math

from contrastive.encoders.base import Transformer, TwoTower

import torch
import torch.nn as nn


class QuestionAnswerer(TwoTower):
    """Videos and questions -> scores of answers, by a transformer over frames and words.

    A small VIOLET (Fu et al. 2021): [CLS], a token for each frame and the words of the question go
    through the fusion, and a linear layer on [CLS] scores the answers of a vocabulary. A question
    with choices has a score for each text "question choice", fused in the same way.

    Args:
        vision, text: the encoders.
        answers: vocabulary of open questions, most frequent first; [] = questions with choices.
        model: 'fusion', as model.json names this model.
        layers: layers of the fusion.
        frames: the most frames that a clip may have.
    """

    def __init__(self, vision, text, answers=(), *, model="fusion", layers=2, frames=1):
        super().__init__(vision, text)
        self.answers = list(answers)
        self.model = model
        width = text.width
        num_heads = next(h for h in (12, 8, 4, 2, 1) if width % h == 0)
        self.frame = nn.Linear(vision.width, width)
        # positions of [CLS] and of the frames
        self.place = nn.Parameter(torch.randn(1 + frames, width) * 0.02)
        self.fusion = Transformer(width, layers, num_heads)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, max(1, len(self.answers)))

    def forward(self, pixels=None, tokens=None, question=None, choices=None):
        """Embeddings of videos and texts, and scores of answers.

        Args:
            pixels: (B, [T,] 3, S, S).
            tokens: {name: (B, L)} of the texts that are paired with the videos; None in evaluation.
            question: {name: (B, L)}; None = what TwoTower returns.
            choices: {name: (B, C, L)} of the texts "question choice", and perhaps choice_mask
                (B, C), False for a missing choice. None = the question is the only choice.
        Returns: video (B, D), text (B, D), scores (B, A) of the vocabulary or (B, C) of choices,
            -inf for a missing one.
        """
        if question is None:
            return super().forward(pixels, tokens)
        frames = self.vision.frames(pixels)                                # (B * T, width)
        _, video = self.vision.pool(frames, pixels)                        # (B, D)
        frames = frames.unflatten(0, (len(pixels), -1))                    # (B, T, width)
        text = None
        if tokens is not None:
            text = self.text(**tokens)                                     # (B, D)
        if self.answers:
            scores = self.open_scores(frames, question)                    # (B, A)
        else:
            if choices is None:
                choices = {name: ids[:, None] for name, ids in question.items()}
            scores = self.choice_scores(frames, choices)                   # (B, C)
        return video, text, scores

    def open_scores(self, frames, question):
        """Scores (B, A) of the vocabulary: frames (B, T, width), question {name: (B, L)}."""
        words, _ = self.text.words(**question)                             # (B, L, W)
        return self.head(self.fuse(frames, words, question["attention_mask"]))

    def choice_scores(self, frames, choices):
        """Scores (B, C) of choices: frames (B, T, width), choices as in forward."""
        ids = choices["input_ids"]                                         # (B, C, L)
        mask = choices["attention_mask"]                                   # (B, C, L)
        B, C = ids.shape[:2]
        flat_mask = mask.flatten(0, 1)                                     # (B * C, L)
        words, _ = self.text.words(ids.flatten(0, 1), flat_mask)           # (B * C, L, W)
        repeated = frames.repeat_interleave(C, dim=0)                      # (B * C, T, width)
        scores = self.head(self.fuse(repeated, words, flat_mask)).view(B, C)
        if "choice_mask" in choices:
            scores = scores.masked_fill(~choices["choice_mask"], -math.inf)
        return scores

    def fuse(self, frames, words, keep):
        """Output of the fusion at [CLS]: (b, W).

        Args:
            frames: (b, T, width) of a clip.
            words: (b, L, W) of a text.
            keep: (b, L), 0 at padding.
        """
        b, T = frames.shape[:2]
        cls = self.place[:1].expand(b, -1, -1)                             # (b, 1, W)
        frames = self.frame(frames) + self.place[1:1 + T]                  # (b, T, W)
        x = torch.cat([cls, frames, words], dim=1)                         # (b, 1 + T + L, W)
        keep = torch.cat([keep.new_ones(b, 1 + T), keep], dim=1).bool()    # (b, 1 + T + L)
        return self.norm(self.fusion(x, keep, first=1))[:, 0]
