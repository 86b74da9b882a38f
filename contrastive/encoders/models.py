"""The model of a run from its flags, and of a finished run from its folder; the model that answers questions."""

import functools
import math
from pathlib import Path

from contrastive.encoders.base import FROM_FILES, STATS, Transformer
from contrastive.encoders.tokenizers import Tokenizer
from contrastive.encoders.towers import freeze_unused
from contrastive.encoders.two_tower import EvalTransform, TextEncoder, TwoTower, VisionEncoder
from contrastive.encoders.vgt import VGT
from contrastive.encoders.weights import init_from
from contrastive.engine.processes import UserError, gather, opening, positive_index, read_json
from contrastive.evaluation.metrics import normalize

import torch
import torch.nn as nn


class QuestionAnswerer(TwoTower):
    """Videos and questions -> scores of answers.

    Args:
        vision, text: the towers.
        answers: the vocabulary of open questions, most frequent first; [] = questions with choices.
        model: 'fusion'; or 'dual', only for questions with choices.
        layers: of the fusion.   frames: the most frames that a clip may have.
        similarity: how videos are compared with texts: 'pooled', before the fusion; or 'fused', by a pass through it.
    block: how many texts at a time go through the fusion with all videos; 0 = automatic, see by_rows.
    """
    by_rows = staticmethod(lambda function, *rows, columns: function(*rows))  # a script's, which cuts them into blocks

    def __init__(self, vision, text, answers=(), model="fusion", layers=2, frames=1, similarity="pooled"):
        super().__init__(vision, text)
        self.answers, self.model, self.frames, self.similarity = list(answers), model, frames, similarity
        if model == "dual":
            self.log_scale = nn.Parameter(torch.tensor(1 / 0.07).log())    # as CLIP's
            return
        width = text.width
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
        words, text = self.text.words(**flat)                              # (B * C, L, W), (B * C, D)
        if self.model == "dual":
            cosine = (normalize(video)[:, None] * normalize(text).unflatten(0, (B, C))).sum(-1)
            scores = cosine * self.log_scale.exp()                         # (B, C)
        else:
            each = frames.repeat_interleave(C, 0)                          # (B * C, T, width)
            scores = self.head(self.fuse(self.place[:1], each, words, flat["attention_mask"])).view(B, C)
        there = choices.get("there")
        return video, paired, scores if there is None else scores.masked_fill(~there, -math.inf)

    def fuse(self, first, frames, words, keep):
        """Output (b, f, W) of the transformer at tokens `first` (f, W), which precede the frames (b, T, width) of a
        clip and words (b, L, W); keep (b, L) is 0 at padding."""
        b, T = frames.shape[:2]
        if T > self.frames:
            raise UserError(f"{T} frames per clip, but this model was made for at most {self.frames}; use "
                            f"--frames {self.frames}")
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


SPEC = ("image_encoder", "text_encoder", "embed_dim", "image_size", "text_length", "text_pooling", "image_stats",
        "eval_resize", "eval_crop", "clean_captions")


def spec_of(args):
    """The model flags of a script, for build_model; without texts only features, on which a script puts its head."""
    without = {} if hasattr(args, "text_encoder") else {"text_encoder": "", "embed_dim": 0}
    return {k: getattr(args, k) for k in SPEC if hasattr(args, k)} | without


def build_model(spec, tokenizer, pretrained, weights=""):
    """TwoTower and EvalTransform from a spec (the content of model.json), which holds the model flags.

    weights: a file for init_from; a timm image encoder is then only downloaded if the file has none of its tensors."""
    hub_id, asked = "/" in spec["image_encoder"], spec.get("questions") or {}
    graph = asked.get("model") == "vgt"
    embed_dim = 0 if graph else spec["embed_dim"]  # VGT has projections of its own
    vision_encoder = functools.partial(
        VisionEncoder, spec["image_encoder"], embed_dim, image_size=spec["image_size"],
        config=spec.get("vision_config"), features=spec.get("features", (0, 0)), frames=spec.get("frames", 0))
    vision = vision_encoder(pretrained=pretrained and (hub_id or not weights))
    text = None
    if spec["text_encoder"]:
        vocabulary = len(tokenizer.tokenizer) if tokenizer else 0
        text = TextEncoder(spec["text_encoder"], embed_dim, pretrained, spec["text_length"], vocabulary,
                           spec["text_pooling"], spec.get("text_config"))
    of_encoder = vision.stats if spec["image_stats"] == "encoder" else STATS[spec["image_stats"]]
    mean, std = spec.get("stats") or of_encoder
    spec.update(stats=[list(mean), list(std)], vision_config=vision.config, text_config=text.config if text else None)
    model = TwoTower(vision, text)
    if graph:
        model = VGT(vision, text, spec["embed_dim"], tokenizer, **asked)
    elif asked:
        model = QuestionAnswerer(vision, text, **asked)
    model.from_file = set(init_from(model, weights)) if weights else set()  # names of tensors
    if weights and pretrained and not any(name.startswith("vision.") for name in model.from_file):
        if not hub_id and spec["image_encoder"] not in ("small", *FROM_FILES):
            model.vision = vision_encoder(pretrained=True)                 # the file is the text encoder's
    if spec["image_encoder"] != "small" or spec["text_encoder"] not in ("small", ""):
        freeze_unused(model, tokenizer, spec)
    return model, EvalTransform(spec["image_size"], mean, std, spec["eval_resize"], spec.get("eval_crop", 1.0))


def untrained(spec, seed):
    """The TwoTower of a spec, without its text encoder, at random weights: the first of a run from scratch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_model(spec | {"text_encoder": "", "questions": {}}, None, pretrained=False)[0].eval()


def load_model(run_dir):
    """(model, tokenizer, transform) of a finished run, on the CPU, in eval mode, offline; tokenizer None without texts.

    model(transform(image)[None])[0] and model(tokens=tokenizer(["a caption"]))[1] are embeddings (1, D) of one space.
    They are not of unit length: `normalize` them, and their products are cosines.
    Raises: UserError when the folder holds no model, or another than model.json says.
    """
    from safetensors.torch import load_file
    run_dir, tokenizer = Path(run_dir), None
    spec = read_json(run_dir / "model.json")
    with opening(run_dir):
        if spec["text_encoder"]:
            tokenizer = Tokenizer.load(run_dir / "tokenizer", spec["text_length"], spec["clean_captions"])
        model, transform = build_model(spec, tokenizer, pretrained=False)
        tensors = load_file(run_dir / "model.safetensors")
        if differ := sorted(tensors.keys() ^ model.state_dict().keys()):
            raise UserError(f"{run_dir}: model.safetensors and model.json differ in {differ[0]}; a fork's backbone "
                            "needs a name in image_tower, its loss's modules belong into `own` (docs/forking.md)")
        model.load_state_dict(tensors)
    return model.eval(), tokenizer, transform
