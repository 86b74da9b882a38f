"""The model of MAMA that answers questions about videos in VIOLET's way."""

import math

from contrastive.core.metrics import normalize
from contrastive.core.processes import gather, positive_index
from contrastive.core.row_blocks import by_rows
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
        similarity: how videos are compared with texts. 'pooled': by the embeddings before the
            fusion. 'fused': by a pass of each pair through it, after a token for the video and one
            for the text in place of [CLS]. 'none': no loss compares them.
    """

    def __init__(self, vision, text, answers=(), *, model="fusion", layers=2, frames=1,
                 similarity="pooled"):
        super().__init__(vision, text)
        self.answers = list(answers)
        self.model = model
        self.similarity = similarity
        width = text.width
        num_heads = next(h for h in (12, 8, 4, 2, 1) if width % h == 0)
        self.frame = nn.Linear(vision.width, width)
        self.place = nn.Parameter(torch.randn(1 + frames, width) * 0.02)   # of [CLS] and the frames
        self.fusion = Transformer(width, layers, num_heads)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, max(1, len(self.answers)))
        if similarity == "fused":
            self.pair = nn.Parameter(torch.randn(2, width) * 0.02)
            # no loss uses the projections, and DDP would wait for their gradients
            vision.projection.requires_grad_(False)
            text.projection.requires_grad_(False)

    def forward(self, pixels=None, tokens=None, question=None, choices=None):
        """Embeddings of videos and texts, and scores of answers.

        Args:
            pixels: (B, [T,] 3, S, S).
            tokens: {name: (B, L)} of the texts that are paired with the videos; None in evaluation.
            question: {name: (B, L)}; None = what TwoTower returns.
            choices: {name: (B, C, L)} of the texts "question choice", and perhaps choice_mask
                (B, C), False for a missing choice. None = the question is the only choice.
        Returns: video (B, D), text (B, D), scores (B, A) of the vocabulary or (B, C) of choices,
            -inf for a missing one. With fused similarity and tokens, video and text are the cosines
            (B, N) of `pair_cosines`.
        """
        if question is None:
            return super().forward(pixels, tokens)
        frames = self.vision.frames(pixels)                                # (B * T, width)
        _, video = self.vision.pool(frames, pixels)                        # (B, D)
        frames = frames.unflatten(0, (len(pixels), -1))                    # (B, T, width)
        text = None
        if tokens is not None and self.similarity == "fused":
            words, _ = self.text.words(**tokens)                           # (B, L, W)
            video, text = self.pair_cosines(frames, words, tokens["attention_mask"])     # (B, N)
        elif tokens is not None:
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
        cls = self.fuse(self.place[:1], frames, words, question["attention_mask"])       # (B, 1, W)
        return self.head(cls[:, 0])

    def choice_scores(self, frames, choices):
        """Scores (B, C) of choices: frames (B, T, width), choices as in forward."""
        ids = choices["input_ids"]                                         # (B, C, L)
        mask = choices["attention_mask"]                                   # (B, C, L)
        B, C = ids.shape[:2]
        flat_mask = mask.flatten(0, 1)                                     # (B * C, L)
        words, _ = self.text.words(ids.flatten(0, 1), flat_mask)           # (B * C, L, W)
        repeated = frames.repeat_interleave(C, dim=0)                      # (B * C, T, width)
        cls = self.fuse(self.place[:1], repeated, words, flat_mask)        # (B * C, 1, W)
        scores = self.head(cls).view(B, C)
        if "choice_mask" in choices:
            scores = scores.masked_fill(~choices["choice_mask"], -math.inf)
        return scores

    def fuse(self, first, frames, words, keep):
        """Output of the fusion at its first tokens: (b, f, W).

        Args:
            first: (f, W) tokens before the frames.
            frames: (b, T, width) of a clip.
            words: (b, L, W) of a text.
            keep: (b, L), 0 at padding.
        """
        b, T = frames.shape[:2]
        first = first.expand(b, -1, -1)                                    # (b, f, W)
        f = first.shape[1]
        frames = self.frame(frames) + self.place[1:1 + T]                  # (b, T, W)
        x = torch.cat([first, frames, words], dim=1)                       # (b, f + T + L, W)
        keep = torch.cat([keep.new_ones(b, f + T), keep], dim=1).bool()    # (b, f + T + L)
        return self.norm(self.fusion(x, keep, first=f))

    def pair_cosines(self, frames, words, keep):
        """Cosines of all pairs of the global batch, each by a pass through the fusion.

        Each process fuses the B * N pairs of its own texts: all clips have T frames, while the
        texts of other processes may be longer.

        Args:
            frames, words, keep: (B, T, width), (B, L, W), (B, L) of this process; row i of each is
                a pair.
        Returns: (B, N) its videos with all texts, and (B, N) its texts with all videos.
        """
        videos = gather(frames)                                            # (N, T, width)
        N, T = videos.shape[:2]

        def text_cosines(words, keep):
            """Cosines (b, N) of b texts with all videos."""
            repeated = videos.repeat(len(words), 1, 1)                     # (b * N, T, width)
            words = words.repeat_interleave(N, dim=0)                      # (b * N, L, W)
            keep = keep.repeat_interleave(N, dim=0)                        # (b * N, L)
            fused = self.fuse(self.pair, repeated, words, keep)            # (b * N, 2, W)
            video, text = normalize(fused).unbind(1)                       # (b * N, W)
            return (video * text).sum(1).view(-1, N)                       # (b, N)

        length = 2 + T + words.shape[1]
        # an activation of all pairs of a text has as many numbers
        activation_size = N * len(self.fusion) * length * words.shape[2]
        texts = by_rows(text_cosines, words, keep, columns=activation_size)              # (B, N)
        return gather(texts)[:, positive_index(texts)].T, texts
