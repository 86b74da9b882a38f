"""VGT, the Video Graph Transformer (Xiao et al., ECCV 2022), the base of MAMA's Table 2.

A video is K clips of F = 4 frames (T = K F), and in each frame a detector has found R regions. The
features of frames and regions are given and not learnt. Steps and sizes are those of the authors'
code, where d = 512. Each transformer has one layer, post-norm, 8 heads (that of edges 5), 2 d
hidden units and dropout 0.3:

     1. region: its feature (2048) beside its box (5 numbers, two 1x1 convolutions, 128), Linear,
        ELU                                                                            (B, T, R, d)
     2. frame: its feature (2048), Linear, GELU, LayerNorm                                (B, T, d)
     3. nodes X: a transformer over the F frames of a clip, for the r-th region of each frame
                                                                                       (B, T, R, d)
     4. edges: A = (X Wk)(X Wq)^T of each frame (d / 2 wide), then a transformer over the F matrices
        of a clip, each one token of R R numbers, then the softmax of each row         (B, T, R, R)
     5. graph convolution, twice: A X W + b + X W, ReLU, dropout (d to d / 2 to d); the result is
        added to X
     6. the regions of a frame become one vector, by softmax weights; beside 2, Linear, ELU
                                                                                          (B, T, d)
     7. the mean over the frames of a clip                                                (B, K, d)
     8. words: to each clip is added its attention over the words of a text, without parameters;
        where there are several choices, each number is the largest of all choices        (B, K, d)
     9. places (sinusoids), LayerNorm, dropout, a transformer over the K clips, mean, dropout,
        Linear: f                                                                            (B, d)

A text goes through BERT and a Linear to d, which gives its words (L, d); g is their mean. Choice c
has the score g_c . f, where g_c is that of the text "question [SEP] choice". Answer a of an open
question has (f . g_a)(g_q . g_a); the vocabulary is encoded anew at each training step.

docs/mama.md lists the differences from the authors' code.
"""

import copy
import math

from contrastive.data.regions import CLIP_FRAMES, box_numbers
from contrastive.encoders.base import GroupNorm, TwoTower, as_clips, masked_mean

import torch
import torch.nn as nn
import torch.nn.functional as F

BOX_WIDTH = 128
ANSWER_LENGTH = 5  # tokens of an answer of the vocabulary
EPS = 1e-12  # added to the variance in each LayerNorm


class PostNorm(nn.Module):
    """A transformer layer without a mask: y = LN(x + MHA(x)), LN(y + FFN(y)), (b, L, width).

    Args:
        heads: largest number of heads; fewer where it does not divide the width.
        hidden: units of the FFN.
    """

    def __init__(self, width, heads, hidden, dropout):
        super().__init__()
        self.heads = next(h for h in range(heads, 0, -1) if width % h == 0)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.norm1 = nn.LayerNorm(width, EPS)
        self.norm2 = nn.LayerNorm(width, EPS)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        b, L, width = x.shape
        qkv = self.qkv(x).view(b, L, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                               # (b, heads, L, dim) each
        scores = q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)  # (b, heads, L, L)
        weight = self.drop(scores.softmax(-1))
        attended = (weight @ v).transpose(1, 2).flatten(2)                 # (b, L, width)
        x = self.norm1(x + self.out(attended))
        return self.norm2(x + self.drop(self.fc2(F.gelu(self.fc1(x)))))


class GraphConvolution(nn.Module):
    """A S + b + S with S = X W: nodes X (n, R, width), edges A (n, R, R) -> (n, R, out)."""

    def __init__(self, width, out):
        super().__init__()
        bound = out ** -0.5
        self.weight = nn.Parameter(torch.empty(width, out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(out).uniform_(-bound, bound))

    def forward(self, x, edges):
        support = x @ self.weight                                          # (n, R, out)
        return edges @ support + self.bias + support


class VideoGraph(nn.Module):
    """Steps 1 to 6: features of frames and regions -> a vector for each frame, (B, T, d).

    Args:
        num_features: width of the features.
        width: d.
        regions: R.
    """

    def __init__(self, num_features, width, regions, dropout):
        super().__init__()
        self.box = nn.Sequential(
            nn.Conv2d(5, BOX_WIDTH, 1), GroupNorm(8, BOX_WIDTH), nn.ReLU(),
            nn.Conv2d(BOX_WIDTH, BOX_WIDTH, 1), GroupNorm(8, BOX_WIDTH), nn.ReLU())
        self.region = nn.Linear(num_features + BOX_WIDTH, width)
        self.frame = nn.Linear(num_features, width)
        self.norm = nn.LayerNorm(width, EPS)
        self.nodes = PostNorm(width, 8, 2 * width, dropout)
        self.key = nn.Linear(width, width // 2)
        self.query = nn.Linear(width, width // 2)
        self.edges = PostNorm(regions ** 2, 5, 2 * width, dropout)
        self.graph = nn.ModuleList([GraphConvolution(width, width // 2),
                                    GraphConvolution(width // 2, width)])
        self.weight = nn.Sequential(nn.Linear(width, width // 2), nn.Tanh(),
                                    nn.Linear(width // 2, 1))
        self.merge = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)
        self.region.apply(small_start)
        self.frame.apply(small_start)

    def forward(self, frames, regions, boxes):
        """frames (B, T, features), regions (B, T, R, features), boxes (B, T, R, 5); T = K F."""
        B, T, R = regions.shape[:3]
        box = self.box(boxes.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)      # (B, T, R, BOX_WIDTH)
        x = F.elu(self.region(torch.cat([regions, box], -1)))              # (B, T, R, d)
        clips = x.unflatten(1, (-1, frames_of_clip(T)))                    # (B, K, F, R, d)
        nodes = clips.transpose(2, 3).flatten(0, 2)                        # (B K R, F, d)
        x = self.nodes(nodes).unflatten(0, (-1, R)).transpose(1, 2)        # (B K, F, R, d)
        edges = self.key(x) @ self.query(x).transpose(-1, -2)              # (B K, F, R, R)
        edges = self.edges(edges.flatten(2))                               # (B K, F, R R)
        edges = edges.view(-1, R, R).softmax(-1)                           # (B T, R, R)
        x = x.flatten(0, 1)                                                # (B T, R, d)
        y = x
        for layer in self.graph:
            y = self.drop(F.relu(layer(y, edges)))
        x = x + y
        weight = self.weight(x).softmax(1)                                 # (B T, R, 1)
        node = (weight * x).sum(1).view(B, T, -1)                          # (B, T, d)
        frames = self.norm(F.gelu(self.frame(frames)))                     # (B, T, d)
        return F.elu(self.merge(torch.cat([frames, node], -1)))            # (B, T, d)


def frames_of_clip(T):
    """F of a video of T frames; an image is a clip of one frame."""
    if T > 1:
        return CLIP_FRAMES
    return 1


def attend_words(video, words, keep, choice_mask):
    """Step 8: video (B, n, d), words (B, C, L, d) -> (B, n, d).

    Args:
        keep: (B, C, L) bool, False for a word without attention.
        choice_mask: (B, C) bool, False for a missing choice.
    """
    scores = torch.einsum("bnd,bcld->bcnl", video, words)                  # (B, C, n, L)
    weight = scores.masked_fill(~keep[:, :, None], -math.inf).softmax(-1)  # (B, C, n, L)
    attended = video[:, None] + weight @ words                             # (B, C, n, d)
    return attended.masked_fill(~choice_mask[..., None, None], -math.inf).amax(1)


def sinusoids(n, width, like):
    """Sinusoids of n positions (n, width), of like's type: sines in even columns, cosines in odd
    ones."""
    column = torch.arange(width, device=like.device)                       # (width,)
    position = torch.arange(n, device=like.device)[:, None]                # (n, 1)
    angle = position / 10_000 ** (2 * (column // 2) / width)               # (n, width)
    return torch.where(column % 2 == 0, angle.sin(), angle.cos()).to(like.dtype)


def small_start(module):
    """Starts a Linear with weights from N(0, 0.02) and bias 0, as the authors start some layers."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


class VGT(TwoTower):
    """Videos and questions -> scores of answers; the interface is that of QuestionAnswerer.

    Args:
        vision: 'regions', whose pixels are features (B, T, (1 + R)(features + 5)) of the frame and
            of each region, each with the 5 numbers of its box; or an image encoder, which is frozen
            and sees a crop for each box.
        text: the text encoder, without a projection.
        width: d.
        tokenizer: reads the answers of the vocabulary.
        answers: the vocabulary; [] = questions with choices.
        model: 'vgt', as model.json names this model.
        regions: R.
        at_frames: whether step 8 attends to words at single frames, too.
    """

    def __init__(self, vision, text, width, tokenizer, *, answers=(), model="vgt", regions=10,
                 dropout=0.3, at_frames=False):
        super().__init__(vision.requires_grad_(False), text)
        self.answers = list(answers)
        self.model = model
        self.regions = regions
        self.at_frames = at_frames
        self.cached_vocabulary = None
        num_features = vision.width
        if vision.name == "regions":
            num_features = vision.width // (1 + regions) - 5
        self.graph = VideoGraph(num_features, width, regions, dropout)
        self.words = nn.Linear(text.width, width)
        self.norm = nn.LayerNorm(width, EPS)
        self.whole = PostNorm(width, 8, 2 * width, dropout).apply(small_start)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(width, width).apply(small_start)
        if self.answers:
            short_tokenizer = copy.copy(tokenizer)
            short_tokenizer.length = min(ANSWER_LENGTH, tokenizer.length)
            for name, ids in short_tokenizer(self.answers).items():        # (A, L) each
                self.register_buffer(f"answer_{name}", ids, persistent=False)

    def train(self, mode=True):
        """As of every module; the frozen image encoder stays in evaluation mode."""
        # weights may change
        self.cached_vocabulary = None
        super().train(mode)
        self.vision.eval()
        return self

    def forward(self, pixels=None, tokens=None, question=None, choices=None):
        """As QuestionAnswerer.forward.

        Args: question: may hold boxes (B, T, R, 4), x1 y1 x2 y2 in pixels of the view.
        """
        frames = video = text = features = None
        if pixels is not None:
            boxes = None
            if question is not None:
                boxes = question.get("boxes")
            frames = self.graph(*self.graph_inputs(pixels, boxes))                 # (B, T, d)
            video = self.summary(frames)                                   # (B, d)
        if tokens is not None:
            _, text = self.read(tokens)                                    # (B, d)
        if question is None:
            if frames is not None:
                features = frames.mean(1)                                  # (B, d)
            return video, text, features
        if choices is None:
            choices = {name: question[name][:, None] for name in ("input_ids", "attention_mask")}
        return video, text, self.scores(frames, choices)

    def scores(self, frames, choices):
        """Scores of answers: frames (B, T, d), choices {name: (B, C, L)} -> (B, A) or (B, C)."""
        words, g = self.read(choices)                                      # (B, C, L, d), (B, C, d)
        keep = choices["attention_mask"].bool()                            # (B, C, L)
        choice_mask = choices.get("choice_mask", keep.any(-1))             # (B, C)
        # each choice is seen up to the length of the longest one
        longest = keep.any(1, keepdim=True).expand_as(keep)                # (B, C, L)
        f = self.summary(frames, words, longest, choice_mask)              # (B, d)
        if self.answers:
            vocabulary = self.vocabulary()                                 # (A, d)
            return (f @ vocabulary.T) * (g[:, 0] @ vocabulary.T)           # (B, A)
        scores = (g * f[:, None]).sum(-1)                                  # (B, C)
        return scores.masked_fill(~choice_mask, -math.inf)

    def graph_inputs(self, pixels, boxes=None):
        """Features (B, T, features) and (B, T, R, features), and boxes (B, T, R, 5), for the graph.

        Args: boxes: (B, T, R, 4) in pixels; None = each region is the whole frame.
        """
        R = self.regions
        if self.vision.name == "regions":
            x = pixels.unflatten(2, (1 + R, -1))                           # (B, T, 1 + R, F + 5)
            return x[:, :, 0, :-5], x[:, :, 1:, :-5], x[:, :, 1:, -5:]
        pixels = as_clips(pixels)                                          # (B, T, 3, S, S)
        B, T = pixels.shape[:2]
        side = pixels.shape[-1]
        if boxes is None:
            boxes = pixels.new_tensor([0, 0, side, side]).expand(B, T, R, 4)
        frames = pixels.reshape(B * T, *pixels.shape[-3:])                 # (B T, 3, S, S)
        with torch.no_grad():
            regions = crops(frames, boxes.flatten(0, 1))                   # (B T, R, 3, S, S)
            pictures = torch.cat([frames[:, None], regions], 1)            # (B T, 1 + R, 3, S, S)
            x = self.vision.frames(pictures.flatten(0, 1))
        x = x.view(B, T, 1 + R, -1)                                        # (B, T, 1 + R, features)
        return x[:, :, 0], x[:, :, 1:], box_numbers(boxes, side, side)

    def read(self, tokens):
        """Tokens (..., L) -> words (..., L, d), and g, the mean of a text's own words (..., d)."""
        ids = tokens["input_ids"]                                          # (..., L)
        mask = tokens["attention_mask"]                                    # (..., L)
        words, _ = self.text.words(ids.flatten(0, -2), mask.flatten(0, -2))              # (b, L, W)
        words = self.words(words).unflatten(0, ids.shape[:-1])             # (..., L, d)
        return words, masked_mean(words, mask)

    def vocabulary(self):
        """g of all answers (A, d). In evaluation it is kept until `train` or `eval` is called."""
        may_cache = not self.training and not torch.is_grad_enabled()
        if may_cache and self.cached_vocabulary is not None:
            return self.cached_vocabulary
        _, vocabulary = self.read({"input_ids": self.answer_input_ids,
                                   "attention_mask": self.answer_attention_mask})
        self.cached_vocabulary = None
        if may_cache:
            self.cached_vocabulary = vocabulary
        return vocabulary

    def summary(self, frames, words=None, keep=None, choice_mask=None):
        """Steps 7 to 9: frames (B, T, d) -> f (B, d). Without words there is no step 8."""
        if words is not None and self.at_frames:
            frames = attend_words(frames, words, keep, choice_mask)
        T = frames.shape[1]
        clips = frames.unflatten(1, (-1, frames_of_clip(T))).mean(2)       # (B, K, d)
        if words is not None:
            clips = attend_words(clips, words, keep, choice_mask)
        K, d = clips.shape[1:]
        x = self.drop(self.norm(clips + sinusoids(K, d, clips)))           # (B, K, d)
        return self.out(self.drop(self.whole(x).mean(1)))


def crops(frames, boxes):
    """The parts of frames (n, 3, S, S) in boxes (n, R, 4), each at the size of a frame.

    Returns: (n, R, 3, S, S).
    """
    n, R = boxes.shape[:2]
    side = frames.shape[-1]
    low, high = boxes[..., :2] / side, boxes[..., 2:] / side               # (n, R, 2) each, 0..1
    scale = torch.diag_embed(high - low)                                   # (n, R, 2, 2)
    shift = (low + high - 1)[..., None]                                    # (n, R, 2, 1)
    theta = torch.cat([scale, shift], -1).flatten(0, 1)                    # (n R, 2, 3)
    grid = F.affine_grid(theta, (n * R, 3, side, side), align_corners=False)
    repeated = frames.repeat_interleave(R, 0)                              # (n R, 3, S, S)
    parts = F.grid_sample(repeated, grid, align_corners=False)             # (n R, 3, S, S)
    return parts.unflatten(0, (n, R))
