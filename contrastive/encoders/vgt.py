"""VGT, the Video Graph Transformer (Xiao et al., ECCV 2022): MAMA's other base for questions, and its best in Table 2.

A video is K clips of F = 4 frames, T = K F, and in each frame a detector has found R regions. The features of frames
and regions are given and not learnt. The steps and sizes are those of the authors' code, with d = 512. Each transformer
has one layer, post-norm, 8 heads (the edges 5), 2 d hidden units and dropout 0.3:

     1. region: its feature (2048) beside its box (5 numbers, two 1x1 convolutions, 128), Linear, ELU     (B, T, R, d)
     2. frame: its feature (2048), Linear, GELU, LayerNorm                                                   (B, T, d)
     3. nodes X: a transformer over the F frames of a clip, for the r-th region of each frame             (B, T, R, d)
     4. edges: A = (X Wk)(X Wq)^T of each frame (d / 2 wide), then a transformer over the F matrices of a clip, each
        of them one token of R R numbers, and then the softmax of each row                                (B, T, R, R)
     5. graph convolution, twice: A X W + b + X W, ReLU, dropout (d to d / 2 to d); the result is added to X
     6. a frame's regions become one vector, by softmax weights; beside 2, Linear, ELU                       (B, T, d)
     7. the mean over the frames of a clip                                                                   (B, K, d)
     8. words: to each clip is added its attention over the words of a text, without parameters; where there are
        several choices, each number is the largest of all choices                                           (B, K, d)
     9. places (sinusoids), LayerNorm, dropout, a transformer over the K clips, mean, dropout, Linear: f        (B, d)

A text goes through BERT and a Linear to d, which gives its words (L, d); g is their mean. Choice c has the score
g_c . f, where g_c is that of the text "question [SEP] choice". Answer a of an open question has (f . g_a)(g_q . g_a);
the answers of the vocabulary are encoded anew at each training step.

Differences from the authors' code:
 1. GroupNorm for the two BatchNorm2d of boxes: a sample's gradient then does not depend on the others of its batch,
    which the same run on any number of processes, exact chunks and MAMA's look-ahead need. Dropout is drawn by each
    process, as BERT's: with --dropout 0 and a text encoder without, two processes are one.
 2. Their g is the mean over all places, padding too, so that it depends on the other texts of a batch. Here it is the
    mean of a text's own words. Step 8 sees what theirs sees: each choice up to the length of the longest, with padding.
 3. MAMA's cosine (Eq. 1) is that of g of a caption with f without step 8, so that B + B embeddings give all pairs;
    nobody says how theirs meets the texts of a batch. The answers keep their dot products, without a temperature.
 4. Step 8 also sees single frames, but for TGIF-QA's action and transition alone, as in the authors' code.
 5. One stage of training, and the last weights are tested. The authors keep the epoch that is best on val, load it and
    train once more with BERT frozen, worth 0.8 points.
 6. Where a set has boxes and no features (moving-emoji), a frozen image encoder sees each crop, at its first weights or
    those of --init-from, in place of the detector.
 7. The vocabulary of open questions is MAMA's, --answers 1500; the size of theirs is not in their code.
"""

import copy
import math

from contrastive.data.clips import REGION_CLIP, box_numbers
from contrastive.encoders.base import GroupNorm, TwoTower, masked_mean

import torch
import torch.nn as nn
import torch.nn.functional as F

FRAMES = REGION_CLIP  # F; K follows from the frames of a video
BOX = 128  # width of a box
ANSWER = 5  # tokens of an answer of the vocabulary
EPS = 1e-12  # of every LayerNorm


class PostNorm(nn.Module):
    """A layer of a transformer, y = LN(x + MHA(x)) and LN(y + FFN(y)), without a mask: (b, L, width) -> the same.

    heads: at most; fewer where the width is not divisible by them."""

    def __init__(self, width, heads, hidden, dropout):
        super().__init__()
        self.heads = next(h for h in range(heads, 0, -1) if width % h == 0)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm1, self.norm2 = nn.LayerNorm(width, EPS), nn.LayerNorm(width, EPS)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        b, L, width = x.shape
        q, k, v = self.qkv(x).view(b, L, 3, self.heads, -1).permute(2, 0, 3, 1, 4)       # (b, heads, L, dim) each
        weight = self.drop((q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)).softmax(-1))
        x = self.norm1(x + self.out((weight @ v).transpose(1, 2).flatten(2)))            # (b, L, width)
        return self.norm2(x + self.drop(self.fc2(F.gelu(self.fc1(x)))))


class GraphConvolution(nn.Module):
    """A S + b + S with S = X W: nodes X (n, R, width), edges A (n, R, R) -> (n, R, out)."""

    def __init__(self, width, out):
        super().__init__()
        bound = out ** -0.5
        self.weight = nn.Parameter(torch.empty(width, out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(out).uniform_(-bound, bound))

    def forward(self, x, edges):
        support = x @ self.weight                                                        # (n, R, out)
        return edges @ support + self.bias + support


class VideoGraph(nn.Module):
    """Steps 1 to 6: features of frames and regions -> (B, T, d), a vector for each frame.

    Args: features: the width of these features.   width: d.   regions: R."""

    def __init__(self, features, width, regions, dropout):
        super().__init__()
        def convolve(channels):
            return nn.Conv2d(channels, BOX, 1), GroupNorm(8, BOX), nn.ReLU()
        self.box = nn.Sequential(*convolve(5), *convolve(BOX))
        self.region, self.frame = nn.Linear(features + BOX, width), nn.Linear(features, width)
        self.norm = nn.LayerNorm(width, EPS)
        self.nodes = PostNorm(width, 8, 2 * width, dropout)
        self.key, self.query = nn.Linear(width, width // 2), nn.Linear(width, width // 2)
        self.edges = PostNorm(regions ** 2, 5, 2 * width, dropout)
        self.graph = nn.ModuleList([GraphConvolution(width, width // 2), GraphConvolution(width // 2, width)])
        self.weight = nn.Sequential(nn.Linear(width, width // 2), nn.Tanh(), nn.Linear(width // 2, 1))
        self.merge, self.drop = nn.Linear(2 * width, width), nn.Dropout(dropout)
        self.region.apply(small_start)
        self.frame.apply(small_start)

    def forward(self, frames, regions, boxes):
        """frames (B, T, features), regions (B, T, R, features), boxes (B, T, R, 5), T a multiple of F."""
        B, T, R = regions.shape[:3]
        places = self.box(boxes.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)                 # (B, T, R, BOX)
        x = F.elu(self.region(torch.cat([regions, places], -1)))                         # (B, T, R, d)
        clips = x.unflatten(1, (-1, FRAMES if T > 1 else 1))                             # (B, K, F, R, d)
        x = self.nodes(clips.transpose(2, 3).flatten(0, 2))                              # (B K R, F, d)
        x = x.unflatten(0, (-1, R)).transpose(1, 2)                                      # (B K, F, R, d)
        edges = self.key(x) @ self.query(x).transpose(-1, -2)                            # (B K, F, R, R)
        edges = self.edges(edges.flatten(2)).view(-1, R, R).softmax(-1)                  # (B T, R, R)
        x = y = x.flatten(0, 1)                                                          # (B T, R, d)
        for layer in self.graph:
            y = self.drop(F.relu(layer(y, edges)))
        x = x + y
        nodes = (self.weight(x).softmax(1) * x).sum(1)                                   # (B T, d), a weighted mean
        frames = self.norm(F.gelu(self.frame(frames)))                                   # (B, T, d)
        return F.elu(self.merge(torch.cat([frames, nodes.view(B, T, -1)], -1)))


def attend_words(video, words, keep, there):
    """Step 8: video (B, n, d) and words (B, C, L, d) -> (B, n, d).

    keep (B, C, L), there (B, C): bool, False for a word that is not seen, and for a choice that a row does not have."""
    scores = torch.einsum("bnd,bcld->bcnl", video, words)                                # (B, C, n, L)
    weight = scores.masked_fill(~keep[:, :, None], -math.inf).softmax(-1)
    each = video[:, None] + weight @ words                                               # (B, C, n, d)
    return each.masked_fill(~there[..., None, None], -math.inf).amax(1)


def places(n, width, like):
    """Sinusoids of n places (n, width), of the type of `like`: sines in even columns, cosines in odd ones."""
    column = torch.arange(width, device=like.device)
    angle = torch.arange(n, device=like.device)[:, None] / 10_000 ** (2 * (column // 2) / width)
    return torch.where(column % 2 == 0, angle.sin(), angle.cos()).to(like.dtype)


def small_start(module):
    """Starts a Linear with weights from N(0, 0.02) and bias 0, as the authors do in a part of the model alone."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


class VGT(TwoTower):
    """Videos and questions -> scores of answers. It is called as common.QuestionAnswerer.

    Args:
        vision: 'regions', whose pixels are features (B, T, (1 + R)(features + 5)) of the frame and of each region,
            each with the 5 numbers of its box; or an image encoder, which is frozen and sees a crop for each box.
        text: the text encoder, without a projection.   width: d.   tokenizer: reads the answers of the vocabulary.
        answers: the vocabulary; [] = questions with choices.   regions: R.   at_frames: step 8 sees frames as well.
    """
    model = "vgt"

    def __init__(self, vision, text, width, tokenizer, answers=(), regions=10, dropout=0.3, at_frames=False,
                 similarity="pooled", **_):
        super().__init__(vision.requires_grad_(False), text)
        self.answers, self.regions, self.at_frames, self.known = list(answers), regions, at_frames, None
        self.similarity = similarity
        features = vision.width // (1 + regions) - 5 if vision.name == "regions" else vision.width
        self.graph = VideoGraph(features, width, regions, dropout)
        self.words = nn.Linear(text.width, width)
        self.norm, self.whole = nn.LayerNorm(width, EPS), PostNorm(width, 8, 2 * width, dropout).apply(small_start)
        self.drop, self.out = nn.Dropout(dropout), nn.Linear(width, width).apply(small_start)
        if self.answers:
            short = copy.copy(tokenizer)
            short.length = min(ANSWER, short.length)
            for name, x in short(self.answers).items():                                  # (A, L) each
                self.register_buffer(f"answer_{name}", x, persistent=False)

    def train(self, mode=True):
        self.known = None                                                                # weights may have changed
        super().train(mode)
        self.vision.eval()
        return self

    def forward(self, pixels=None, tokens=None, question=None, choices=None):
        """As common.QuestionAnswerer. question may hold boxes (B, T, R, 4), x1 y1 x2 y2 in pixels of the view."""
        video = f = None
        if pixels is not None:
            video = self.graph(*self.look(pixels, (question or {}).get("boxes")))        # (B, T, d)
            f = self.summary(video)                                                      # (B, d)
        paired = self.read(tokens)[1] if tokens is not None else None                    # (B, d)
        if question is None:
            return f, paired, None if video is None else video.mean(1)
        if choices is None:
            choices = {k: question[k][:, None] for k in ("input_ids", "attention_mask")}
        words, g = self.read(choices)                                                    # (B, C, L, d), (B, C, d)
        keep = choices["attention_mask"].bool()                                          # (B, C, L)
        there = choices.get("there", keep.any(-1))                                       # (B, C)
        longest = keep.any(1, keepdim=True).expand_as(keep)
        answer = self.summary(video, words, longest, there)                              # (B, d)
        if self.answers:
            known = self.vocabulary()                                                    # (A, d)
            return f, paired, (answer @ known.T) * (g[:, 0] @ known.T)                   # (B, A)
        scores = (g * answer[:, None]).sum(-1)                                           # (B, C)
        return f, paired, scores.masked_fill(~there, -math.inf)

    def look(self, pixels, boxes=None):
        """Features of frames (B, T, features) and of regions (B, T, R, features), and boxes (B, T, R, 5). Without boxes
        each region is the whole frame."""
        T, R = 1 if pixels.ndim == 4 else pixels.shape[1], self.regions
        if self.vision.name == "regions":
            x = pixels.unflatten(2, (1 + R, -1))                                         # (B, T, 1 + R, features + 5)
            return x[:, :, 0, :-5], x[:, :, 1:, :-5], x[:, :, 1:, -5:]
        B, side = len(pixels), pixels.shape[-1]
        if boxes is None:
            boxes = pixels.new_tensor([0, 0, side, side]).expand(B, T, R, 4)
        frames = pixels.reshape(B * T, *pixels.shape[-3:])                               # (B T, 3, S, S)
        with torch.no_grad():
            seen = torch.cat([frames[:, None], crops(frames, boxes.flatten(0, 1))], 1)   # (B T, 1 + R, 3, S, S)
            x = self.vision.frames(seen.flatten(0, 1)).view(B, T, 1 + R, -1)             # (B, T, 1 + R, features)
        return x[:, :, 0], x[:, :, 1:], box_numbers(boxes, side, side)

    def read(self, tokens):
        """Tokens (..., L) -> words (..., L, d), and g, the mean of a text's own words (..., d)."""
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        words = self.words(self.text.words(ids.flatten(0, -2), mask.flatten(0, -2))[0])  # (b, L, d)
        words = words.unflatten(0, ids.shape[:-1])                                       # (..., L, d)
        return words, masked_mean(words, mask)

    def vocabulary(self):
        """g of all answers (A, d). In evaluation it is kept until the next call of `train` or `eval`."""
        if not self.training and not torch.is_grad_enabled() and self.known is not None:
            return self.known
        known = self.read({k: getattr(self, f"answer_{k}") for k in ("input_ids", "attention_mask")})[1]
        self.known = None if self.training or torch.is_grad_enabled() else known
        return known

    def summary(self, video, words=None, keep=None, there=None):
        """Steps 7 to 9: frames (B, T, d) -> f (B, d). Without words there is no step 8."""
        if words is not None and self.at_frames:
            video = attend_words(video, words, keep, there)
        clips = video.unflatten(1, (-1, FRAMES if video.shape[1] > 1 else 1)).mean(2)    # (B, K, d)
        if words is not None:
            clips = attend_words(clips, words, keep, there)
        x = self.drop(self.norm(clips + places(*clips.shape[1:], clips)))                # (B, K, d)
        return self.out(self.drop(self.whole(x).mean(1)))


def crops(frames, boxes):
    """The parts of frames (n, 3, S, S) in boxes (n, R, 4), each drawn at the size of a frame: (n, R, 3, S, S)."""
    n, R, side = *boxes.shape[:2], frames.shape[-1]
    low, high = boxes[..., :2] / side, boxes[..., 2:] / side                             # (n, R, 2) each, 0..1
    theta = torch.cat([torch.diag_embed(high - low), (low + high - 1)[..., None]], -1)   # (n, R, 2, 3)
    grid = F.affine_grid(theta.flatten(0, 1), (n * R, 3, side, side), align_corners=False)
    drawn = F.grid_sample(frames.repeat_interleave(R, 0), grid, align_corners=False)     # (n R, 3, S, S)
    return drawn.unflatten(0, (n, R))
